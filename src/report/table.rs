//! A table of right-aligned columns that drops what does not fit, and never wraps.

/// One column.
#[derive(Debug, Clone)]
pub struct Column {
    title: String,
    left: bool,
    /// Dropped in ascending order when the table is too wide; `None` stays.
    drop: Option<u8>,
    cells: Vec<String>,
}

impl Column {
    /// A column that always stays, right-aligned.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), left: false, drop: None, cells: Vec::new() }
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

    fn width(&self) -> usize {
        self.cells.iter().chain([&self.title]).map(|c| c.chars().count()).max().unwrap_or(0)
    }
}

const GAP: usize = 2;

/// The table in at most `width` columns of text, as one line for the titles and one a row. `style` may colour a row.
pub fn render(mut columns: Vec<Column>, width: usize, style: impl Fn(usize, &str) -> String) -> String {
    columns.retain(|c| c.cells.iter().any(|cell| !cell.is_empty() && cell != "-") || c.drop.is_none());
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
    let rows = columns.iter().map(|c| c.cells.len()).max().unwrap_or(0);
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
