//! Text in and out of the built-in model: its tokenizer and its chat template against references.

use crate::speculation::{NANO, golden, golden_json, ids};
use serde_json::Value;
use specprof::engine::chat::ChatTemplate;
use specprof::engine::tokenizer::Tokenizer;
use std::path::Path;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(&NANO.file("tokenizer.json").unwrap().unwrap(), Path::new("tokenizer.json")).unwrap()
}

fn template() -> ChatTemplate {
    let jinja = NANO.file("chat_template.jinja").unwrap().unwrap();
    ChatTemplate::from_files(Some((&jinja, Path::new("chat_template.jinja"))), None).unwrap().unwrap()
}

#[test]
fn prompts_are_tokenized_as_in_training() {
    let tokenizer = tokenizer();
    let mut chats = 0;
    for line in golden("prompts.jsonl").lines() {
        let prompt: Value = serde_json::from_str(line).unwrap();
        let text = prompt["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&prompt["token_ids"]), "{text}");
        assert_eq!(tokenizer.decode(&ids(&prompt["token_ids"])).unwrap(), text);
        if let Some(messages) = prompt["messages"].as_array() {
            chats += 1;
            assert_eq!(template().render(messages, prompt["enable_thinking"].as_bool()).unwrap(), text);
        }
    }
    assert_eq!(chats, 2);
    for want in golden_json("tokens.json") {
        assert_eq!(tokenizer.decode(&ids(&want["plain"])).unwrap(), want["text"].as_str().unwrap());
    }
}

#[test]
fn any_text_survives_the_tokenizer() {
    let tokenizer = tokenizer();
    for text in
        ["", " ", "line\nbreak\r\n\r\ntabs\t.", "it's we'll I'VE", "naïve café — 你好，世界 🙂", "1234567 and 3.14", "<think>x</think>"]
    {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap()).unwrap(), text);
    }
    // Special tokens are one id each, in a plain text too.
    assert_eq!(tokenizer.encode("<|role_end|>", false).unwrap(), [2028]);
    assert_eq!(tokenizer.id_of("<|role_end|>"), Some(2028));
}

#[test]
fn conversations_render_as_in_jinja2() {
    let cases = golden_json("chat.json");
    assert_eq!(cases.len(), 7);
    for case in cases {
        let text = template().render(case["messages"].as_array().unwrap(), case["enable_thinking"].as_bool()).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap());
    }
}

#[test]
fn a_damaged_tokenizer_names_the_file_on_one_line() {
    for bytes in [b"".as_slice(), b"{}", b"{\"model\": 3}", b"\xff\xfe"] {
        let error = Tokenizer::from_bytes(bytes, Path::new("dir/tokenizer.json")).unwrap_err().to_string();
        assert!(error.starts_with("dir/tokenizer.json: ") && error.lines().count() == 1, "{error}");
    }
}
