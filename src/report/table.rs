//! One description of a table for every format: aligned text that drops what does not fit, Markdown, CSV.
//!
//! A cell has a short text for people and, where the column has a key, a value for machines. A column
//! without a key is a picture in characters and is in the text alone.

use super::wrap::plain;

/// One column.
#[derive(Debug, Clone, Default)]
pub struct Column {
    title: String,
    /// Its name in CSV; empty when it is in none.
    key: String,
    left: bool,
    /// In CSV alone.
    machine: bool,
    /// Dropped in ascending order when the table is too wide; `None` stays.
    drop: Option<u8>,
    cells: Vec<String>,
    /// Cells of CSV.
    values: Vec<String>,
}

impl Column {
    /// A column that always stays, right-aligned.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), ..Self::default() }
    }

    /// A column that only CSV has: numbers that text would not show one by one.
    pub fn machine(key: &str, values: impl IntoIterator<Item = Option<f64>>) -> Self {
        Self { machine: true, ..Self::default() }.numbers(key, values)
    }

    /// The same of words.
    pub fn machine_words(key: &str, values: impl IntoIterator<Item = String>) -> Self {
        Self { machine: true, ..Self::default() }.words(key, values)
    }

    /// Left-aligned instead.
    pub fn left(self) -> Self {
        Self { left: true, ..self }
    }

    /// Dropped when there is no room; a smaller number goes earlier.
    pub fn optional(self, order: u8) -> Self {
        Self { drop: Some(order), ..self }
    }

    /// The column with these cells.
    pub fn cells(self, cells: impl IntoIterator<Item = String>) -> Self {
        Self { cells: cells.into_iter().collect(), ..self }
    }

    /// The column's name in CSV and its numbers there, in full; what is unknown is empty.
    pub fn numbers(self, key: &str, values: impl IntoIterator<Item = Option<f64>>) -> Self {
        let show = |v: Option<f64>| v.filter(|v| v.is_finite()).map_or_else(String::new, |v| v.to_string());
        self.words(key, values.into_iter().map(show))
    }

    /// The column's name in CSV and its words there.
    pub fn words(self, key: &str, values: impl IntoIterator<Item = String>) -> Self {
        Self { key: key.to_owned(), values: values.into_iter().collect(), ..self }
    }

    /// The title.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The texts for people.
    pub fn texts(&self) -> &[String] {
        &self.cells
    }

    /// The values for machines, one for each row; empty without a key.
    pub fn values(&self) -> &[String] {
        &self.values
    }

    /// Whether it is aligned to the left.
    pub fn is_left(&self) -> bool {
        self.left
    }

    /// Whether Markdown and HTML show it: it is no picture, not for machines alone, and something is known.
    pub fn is_shown(&self) -> bool {
        !self.machine && !self.key.is_empty() && (self.drop.is_none() || self.is_known())
    }

    fn is_known(&self) -> bool {
        self.cells.iter().any(|cell| !cell.is_empty() && cell != "-")
    }

    fn width(&self) -> usize {
        self.cells.iter().chain([&self.title]).map(|c| c.chars().count()).max().unwrap_or(0)
    }
}

/// A table as Markdown (GitHub's), a blank line behind it.
pub fn markdown(columns: &[Column]) -> String {
    let shown: Vec<&Column> = columns.iter().filter(|c| c.is_shown()).collect();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut out = line(shown.iter().map(|c| escape_markdown(&c.title)).collect());
    out.push_str(&line(shown.iter().map(|c| if c.left { ":---".to_owned() } else { "---:".to_owned() }).collect()));
    for row in 0..rows(&shown) {
        out.push_str(&line(shown.iter().map(|c| c.cells.get(row).map_or_else(String::new, |cell| escape_markdown(cell))).collect()));
    }
    out.push('\n');
    out
}

/// A table as CSV (RFC 4180, lines end with a line feed): a line of keys, then one line a row.
pub fn csv(columns: &[Column]) -> String {
    let keyed: Vec<&Column> = columns.iter().filter(|c| !c.key.is_empty()).collect();
    let line = |cells: Vec<&str>| cells.into_iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
    let mut out = line(keyed.iter().map(|c| c.key.as_str()).collect());
    let rows = keyed.iter().map(|c| c.values.len()).max().unwrap_or(0);
    for row in 0..rows {
        out.push_str(&line(keyed.iter().map(|c| c.values.get(row).map_or("", String::as_str)).collect()));
    }
    out
}

/// Text that cannot become markup in Markdown, nor steer a terminal.
pub fn escape_markdown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in plain(text).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '|' | '\\' | '`' | '*' | '_' | '[' | ']' | '#' | '!' | '~' | '@' => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

/// A cell of CSV. Words that a spreadsheet would take for a formula are led by an apostrophe, as spreadsheets mark text; numbers below 0
/// are none. What holds a separator, a quote or the end of a line is quoted, its quotes doubled.
fn quoted(cell: &str) -> String {
    let formula = cell.starts_with(['=', '+', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'])
        || (cell.starts_with('-') && cell.parse::<f64>().is_err());
    let cell = if formula { format!("'{cell}") } else { cell.to_owned() };
    if cell.contains([',', '"', '\n', '\r', '\'']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
}

fn rows(columns: &[&Column]) -> usize {
    columns.iter().map(|c| c.cells.len()).max().unwrap_or(0)
}

const GAP: usize = 2;

/// The table in at most `width` columns of text, as one line for the titles and one a row. `style` may colour a row.
pub fn render(mut columns: Vec<Column>, width: usize, style: impl Fn(usize, &str) -> String) -> String {
    columns.retain(|c| !c.machine && (c.is_known() || c.drop.is_none()));
    let total = |columns: &[Column]| columns.iter().map(Column::width).sum::<usize>() + GAP * columns.len().saturating_sub(1);
    while total(&columns) > width {
        let next = columns.iter().enumerate().filter_map(|(i, c)| c.drop.map(|order| (order, i))).min();
        match next {
            Some((_, i)) => drop(columns.remove(i)),
            None => break,
        }
    }
    let line = |of: &dyn Fn(&Column) -> String| {
        let mut line = String::new();
        for (i, column) in columns.iter().enumerate() {
            let (cell, width) = (of(column), column.width());
            if i > 0 {
                line.extend(std::iter::repeat_n(' ', GAP));
            }
            let blanks = width.saturating_sub(cell.chars().count());
            if column.left {
                line.push_str(&cell);
                line.extend(std::iter::repeat_n(' ', blanks));
            } else {
                line.extend(std::iter::repeat_n(' ', blanks));
                line.push_str(&cell);
            }
        }
        line.trim_end().to_owned()
    };
    let rows = rows(&columns.iter().collect::<Vec<_>>());
    let mut out = line(&|c| c.title.clone());
    out.push('\n');
    for row in 0..rows {
        out.push_str(&style(row, &line(&|c| c.cells.get(row).cloned().unwrap_or_default())));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Vec<Column> {
        let cells = |cells: [&str; 2]| cells.map(str::to_owned);
        vec![
            Column::new("name").left().cells(cells(["a", "bcd"])),
            Column::new("n").cells(cells(["1", "200"])),
            Column::new("wide").optional(2).cells(cells(["12345678", "1"])),
            Column::new("first to go").optional(1).cells(cells(["x", "y"])),
            Column::new("unknown").optional(9).cells(cells(["-", "-"])),
        ]
    }

    #[test]
    fn markdown_and_csv_are_of_the_same_columns() {
        let mut columns = columns();
        columns[0] = columns[0].clone().words("name", ["a|<b>".to_owned(), "=1+2, \"x\"".to_owned()]);
        columns[1] = columns[1].clone().numbers("n", [Some(1.0 / 3.0), None]);
        columns[0].cells[0] = "a|<b>\x1b[2J".into();
        columns.push(Column::machine("more", [Some(-2.0), Some(1e9)]));
        assert_eq!(markdown(&columns), "| name | n |\n| :--- | ---: |\n| a\\|&lt;b&gt;?\\[2J | 1 |\n| bcd | 200 |\n\n");
        assert_eq!(csv(&columns), "name,n,more\na|<b>,0.3333333333333333,-2\n\"'=1+2, \"\"x\"\"\",,1000000000\n");
    }

    #[test]
    fn optional_columns_go_before_anything_wraps() {
        let plain = |_: usize, line: &str| line.to_owned();
        assert_eq!(
            render(columns(), 80, plain),
            "name    n      wide  first to go\na       1  12345678            x\nbcd   200         1            y\n"
        );
        assert_eq!(render(columns(), 20, plain), "name    n      wide\na       1  12345678\nbcd   200         1\n");
        assert_eq!(render(columns(), 5, plain), "name    n\na       1\nbcd   200\n");
    }
}
