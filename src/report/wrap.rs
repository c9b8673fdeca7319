//! Text of a foreign origin made safe for a terminal, and lines broken at a width.

/// The text without control characters: a model's name must not move the cursor or change a colour.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// `text` broken at blanks so that no line is wider than `width` where a word fits; the first line begins with
/// `first`, every other one with as many blanks. Ends in a newline.
pub fn paragraph(first: &str, text: &str, width: usize) -> String {
    let indent = first.chars().count();
    let mut out = String::from(first);
    let mut column = indent;
    for (i, word) in words(text).iter().enumerate() {
        let length = word.chars().count();
        if i > 0 && column + 1 + length > width {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if i > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
    out
}

/// [`paragraph`] under a title of at most 11 columns, which is bold where colour is wanted.
pub fn titled(title: &str, text: &str, width: usize, color: bool) -> String {
    let lines = paragraph(&format!("{title:<12}"), text, width);
    match lines.strip_prefix(title).filter(|_| color && !title.is_empty()) {
        Some(rest) => {
            let bold = anstyle::Style::new().bold();
            format!("{bold}{title}{bold:#}{rest}")
        }
        None => lines,
    }
}

/// The words of a text; a lone `%` and a group of three digits stay with the number before them.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match words.last_mut() {
            Some(last) if word.starts_with('%') || (goes_on(word) && last.ends_with(|c: char| c.is_ascii_digit())) => {
                last.push(' ');
                last.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

/// Whether a word is the next group of a number's digits, with what may follow a number.
fn goes_on(word: &str) -> bool {
    let digits = word.bytes().take_while(u8::is_ascii_digit).count();
    digits == 3 && !word[3..].starts_with(|c: char| c.is_alphanumeric() || c == '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_taken_apart() {
        assert_eq!(
            words("over 1 270 passes, 17 % (12 345), 3 100x 4 1.5 2000"),
            ["over", "1 270", "passes,", "17 %", "(12 345),", "3", "100x", "4", "1.5", "2000"]
        );
    }

    #[test]
    fn lines_break_at_blanks() {
        assert_eq!(paragraph("[1] ", "one two three", 11), "[1] one two\n    three\n");
        assert_eq!(paragraph("", "by 88 % more", 6), "by\n88 %\nmore\n");
        assert_eq!(paragraph("", "incompressible", 4), "incompressible\n");
        assert_eq!(plain("a\x1b[31mb\n"), "a?[31mb?");
    }
}
