//! Messages to the prompt text, by the checkpoint's own chat template.
//!
//! Templates are written for Python's Jinja2 as set up by transformers: blocks trimmed, string and list methods,
//! a `tojson` that escapes nothing, `raise_exception` and `strftime_now`. This is that environment.

use super::EngineError;
use super::guard::{FUEL, MAX_RENDERED, MAX_TEMPLATE, STACK};
use crate::trace::quiet;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "chat_template";

/// A checkpoint's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    path: PathBuf,
    special: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// The template of a checkpoint: `chat_template.jinja` when there is one, else `chat_template` of `tokenizer_config.json`
    /// (a text, or a list of named ones with `default` in it). `None` when the checkpoint has no template.
    /// Both files are given with the path that names them in errors.
    ///
    /// # Errors
    /// When a file is not what it should be, or the template is not valid.
    pub fn from_files(jinja: Option<(&[u8], &Path)>, tokenizer_config: Option<(&[u8], &Path)>) -> Result<Option<Self>, EngineError> {
        let config = tokenizer_config.map(|(bytes, path)| parse_config(bytes, path)).transpose()?;
        let special = config.as_ref().map(special_tokens).unwrap_or_default();
        if let Some((bytes, path)) = jinja {
            let text = std::str::from_utf8(bytes).map_err(|_| damaged(path, "the template is not UTF-8 text"))?;
            return Self::new(text, path, special).map(Some);
        }
        let (Some(config), Some((_, path))) = (config, tokenizer_config) else { return Ok(None) };
        match config.get("chat_template").and_then(template_text) {
            Some(text) => Self::new(text, path, special).map(Some),
            None => Ok(None),
        }
    }

    fn new(text: &str, path: &Path, special: BTreeMap<String, String>) -> Result<Self, EngineError> {
        if text.len() > MAX_TEMPLATE {
            return Err(damaged(path, &format!("the chat template has {} bytes; at most {MAX_TEMPLATE} are taken", text.len())));
        }
        on_a_deep_stack(path, || Self::compile(text, path, special))
    }

    fn compile(text: &str, path: &Path, special: BTreeMap<String, String>) -> Result<Self, EngineError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| template_failure(path, &e))?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        // A template that recurses or loops without end must not hang a recording.
        environment.set_recursion_limit(200);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(|state, value, method, args| {
            // A width in a format string is a length of the template's choosing.
            if method == "format" {
                return Err(Error::new(ErrorKind::UnknownMethod, "str.format is not available in chat templates here"));
            }
            minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
        });
        // Filters that make as much text as a number in the template says.
        for filter in ["format", "slice", "batch"] {
            environment.remove_filter(filter);
        }
        environment.add_filter("indent", indent);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
        environment.add_template_owned(NAME, text.to_owned()).map_err(|e| template_failure(path, &e))?;
        Ok(Self { environment, path: path.to_owned(), special })
    }

    /// The prompt of a conversation, ending where the assistant's answer begins. `messages` are objects with `role` and
    /// `content`; `enable_thinking` is left to the template's default when `None`.
    ///
    /// # Errors
    /// When the template fails or refuses the messages.
    pub fn render(&self, messages: &[serde_json::Value], enable_thinking: Option<bool>) -> Result<String, EngineError> {
        let mut context: BTreeMap<&str, Value> = self.special.iter().map(|(k, v)| (k.as_str(), Value::from(v.as_str()))).collect();
        context.insert("messages", Value::from(minijinja::value::Serde(messages)));
        context.insert("add_generation_prompt", Value::from(true));
        if let Some(on) = enable_thinking {
            context.insert("enable_thinking", Value::from(on));
        }
        let render = || {
            let template = self.environment.get_template(NAME).map_err(|e| template_failure(&self.path, &e))?;
            let mut out = Capped(Vec::new());
            template.render_captured_to(context, &mut out).map_err(|e| template_failure(&self.path, &e))?;
            String::from_utf8(out.0).map_err(|_| damaged(&self.path, "the chat template made text that is not UTF-8"))
        };
        on_a_deep_stack(&self.path, render)
    }
}

/// Runs a piece of template work where deep nesting does not end the process.
fn on_a_deep_stack<T: Send>(path: &Path, work: impl FnOnce() -> Result<T, EngineError> + Send) -> Result<T, EngineError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || quiet::catch(work));
        let thread =
            thread.map_err(|source| EngineError::Io { path: path.to_owned(), action: "start a thread for the chat template", source })?;
        thread.join().ok().flatten().unwrap_or_else(|| Err(damaged(path, "the chat template cannot be run")))
    })
}

/// Output of a template up to [`MAX_RENDERED`] bytes.
struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED {
            return Err(io::Error::other(format!("more than {MAX_RENDERED} bytes of prompt")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Jinja's `indent` with a bounded width.
fn indent(text: String, width: Option<usize>, first: Option<bool>, blank: Option<bool>) -> Result<String, Error> {
    let width = width.unwrap_or(4);
    if width > 64 || text.len().saturating_add(width * text.matches('\n').count()) > MAX_RENDERED {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("indent by {width} is more than a prompt needs")));
    }
    let pad = " ".repeat(width);
    let line = |(i, line): (usize, &str)| {
        let padded = if i == 0 { first.unwrap_or(false) } else { !line.is_empty() || blank.unwrap_or(false) };
        if padded { format!("{pad}{line}") } else { line.to_owned() }
    };
    Ok(text.split('\n').enumerate().map(line).collect::<Vec<_>>().join("\n"))
}

/// The token of `key` (`eos_token`, ...) in a `tokenizer_config.json`: a text, or an object with `content`.
///
/// # Errors
/// When the bytes are not a JSON object.
pub fn special_token(config: &[u8], path: &Path, key: &str) -> Result<Option<String>, EngineError> {
    Ok(special_tokens(&parse_config(config, path)?).remove(key))
}

fn parse_config(bytes: &[u8], path: &Path) -> Result<serde_json::Map<String, serde_json::Value>, EngineError> {
    serde_json::from_slice(bytes).map_err(|e| damaged(path, &format!("not a JSON object: {e}")))
}

fn special_tokens(config: &serde_json::Map<String, serde_json::Value>) -> BTreeMap<String, String> {
    let text = |v: &serde_json::Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
    config.iter().filter(|(key, _)| key.ends_with("_token")).filter_map(|(key, v)| Some((key.clone(), text(v)?))).collect()
}

fn template_text(value: &serde_json::Value) -> Option<&str> {
    let named = |v: &serde_json::Value| v.get("name").and_then(|n| n.as_str()) == Some("default");
    value.as_str().or_else(|| value.as_array()?.iter().find(|v| named(v))?.get("template")?.as_str())
}

fn damaged(path: &Path, reason: &str) -> EngineError {
    EngineError::Checkpoint { path: path.to_owned(), reason: reason.to_owned() }
}

fn template_failure(path: &Path, error: &Error) -> EngineError {
    let line = error.line().map(|l| format!(" at line {l}")).unwrap_or_default();
    damaged(path, &format!("chat template{line}: {}", error.detail().unwrap_or(&error.kind().to_string())))
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`: a space after comma and colon, no HTML escapes.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Templates pass these too; they say what is done anyway.
    for key in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(key)?;
    }
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(n) => {
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(" ".repeat(n.min(16)).as_bytes())))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    // Marked safe for templates that switch escaping on.
    String::from_utf8(out).map(Value::from_safe_string).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// One line, with a space after every comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// `strftime` of a time in UTC for the directives that templates use; others stay as they are.
fn strftime(format: &str, time: SystemTime) -> String {
    const MONTHS: [&str; 12] =
        ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match rest.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day number since 1970-01-01 in the proleptic Gregorian calendar: years are counted from
/// March, so that a leap day is the last of its year.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day_of_year - (153 * from_march + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::Duration;

    fn template(text: &str) -> ChatTemplate {
        ChatTemplate::from_files(Some((text.as_bytes(), Path::new("dir/chat_template.jinja"))), None).unwrap().unwrap()
    }

    fn render(text: &str, messages: serde_json::Value) -> String {
        template(text).render(messages.as_array().unwrap(), None).unwrap()
    }

    #[test]
    fn python_methods_and_json_work_as_in_jinja2() {
        let text = "{% for m in messages %}\n{{ m.content.strip().split(' ')[0] }}|{{ m | tojson }}\n{% endfor %}\n";
        assert_eq!(render(text, json!([{"role": "user", "content": " a <b> "}])), "a|{\"role\": \"user\", \"content\": \" a <b> \"}\n");
    }

    #[test]
    fn thinking_is_undefined_unless_given() {
        let t = template("{{ 'default' if enable_thinking is not defined else enable_thinking }}");
        assert_eq!(t.render(&[], None).unwrap(), "default");
        assert_eq!(t.render(&[], Some(false)).unwrap().to_lowercase(), "false");
    }

    #[test]
    fn a_hostile_template_is_an_error_and_not_the_end() {
        let deep = format!("{{{{ {}1 }}}}", "not ".repeat(16_000));
        let deeper = format!("{{{{ {}1 }}}}", "-".repeat(60_000));
        let long = "x".repeat(MAX_TEMPLATE + 1);
        for text in [
            deep.as_str(),
            &deeper,
            &long,
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
            "{{ 'x\ny' | indent(10000000000) }}",
            "{{ '{:>9999999999}'.format(1) }}",
            "{{ range(10) | slice(10000000000) | list }}",
        ] {
            let made = ChatTemplate::from_files(Some((text.as_bytes(), Path::new("dir/chat_template.jinja"))), None);
            let ended = made.and_then(|t| t.map_or(Ok(String::new()), |t| t.render(&[], None)));
            // Deep nesting may be legal; what matters is that it comes back, and small.
            match ended {
                Ok(prompt) => assert!(prompt.len() < 100, "{}", &text[..40]),
                Err(e) => assert!(e.to_string().contains("chat_template.jinja"), "{e}"),
            }
        }
        assert_eq!(render("{{ 'a\nb' | indent }}|{{ 'a\n\nb' | indent(2, true, true) }}", json!([])), "a\n    b|  a\n  \n  b");
    }

    #[test]
    fn what_the_template_refuses_names_the_file() {
        let refused = template("{{ raise_exception('roles must alternate') }}").render(&[], None).unwrap_err().to_string();
        assert!(refused.contains("chat_template.jinja") && refused.contains("roles must alternate"), "{refused}");
        let invalid = ChatTemplate::from_files(Some((b"{% if %}", Path::new("dir/chat_template.jinja"))), None).unwrap_err().to_string();
        assert!(invalid.contains("dir/chat_template.jinja") && invalid.contains("line 1"), "{invalid}");
    }

    #[test]
    fn the_template_is_found_in_the_tokenizer_config() {
        let path = Path::new("tokenizer_config.json");
        let of = |config: serde_json::Value| ChatTemplate::from_files(None, Some((config.to_string().as_bytes(), path)));
        let one = of(json!({"chat_template": "{{ bos_token }}x", "bos_token": {"content": "<s>"}})).unwrap().unwrap();
        assert_eq!(one.render(&[], None).unwrap(), "<s>x");
        let list =
            of(json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})).unwrap().unwrap();
        assert_eq!(list.render(&[], None).unwrap(), "d");
        assert!(of(json!({"eos_token": "x"})).unwrap().is_none());
        assert!(ChatTemplate::from_files(None, Some((b"[", path))).unwrap_err().to_string().contains("tokenizer_config.json"));
        assert_eq!(special_token(br#"{"eos_token": "<e>"}"#, path, "eos_token").unwrap().as_deref(), Some("<e>"));
    }

    #[test]
    fn dates_are_the_calendar_s() {
        let at = |seconds| strftime("%Y-%m-%d %H:%M:%S %A %b %j%%", UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01 00:00:00 Thursday Jan %j%");
        assert_eq!(at(951_782_400), "2000-02-29 00:00:00 Tuesday Feb %j%");
        assert_eq!(at(1_735_689_599), "2024-12-31 23:59:59 Tuesday Dec %j%");
    }
}
