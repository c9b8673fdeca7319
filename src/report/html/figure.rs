//! What a figure of the page consists of, and its tables.

use crate::report::svg::Grid;
use crate::report::table::Column;
use serde::Serialize;

/// A chart with everything that is said about it.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// Its place in the page.
    pub id: &'static str,
    /// What it shows.
    pub title: String,
    /// The picture; `None` when there is nothing to show.
    pub svg: Option<String>,
    /// Why there is no picture.
    pub missing: String,
    /// What it says, in one line.
    pub reading: String,
    /// Over how many windows, layers, steps.
    pub n: String,
    /// The unit of its values.
    pub unit: String,
    /// Names of the curves.
    pub legend: Vec<Entry>,
    /// Ends of the scale of a heat map.
    pub ramp: Option<(String, String)>,
    /// Its numbers.
    pub table: Option<Grids>,
}

/// One entry of a legend.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// `line`, `dashed`, `dot` or `block`.
    pub kind: &'static str,
    /// The CSS variable of its colour.
    pub color: &'static str,
    /// Its name.
    pub text: String,
}

/// Figures under one heading.
#[derive(Debug, Clone, Serialize)]
pub struct Section {
    /// Its place in the page.
    pub id: &'static str,
    /// The heading.
    pub title: &'static str,
    /// What it is about.
    pub intro: String,
    /// Its figures.
    pub figures: Vec<Figure>,
}

/// A table of the page.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Grids {
    /// Its place in the page.
    pub id: &'static str,
    /// What it shows.
    pub title: String,
    /// One sentence.
    pub intro: String,
    /// Its columns.
    pub columns: Vec<Head>,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// The head of a column.
#[derive(Debug, Clone, Serialize)]
pub struct Head {
    title: String,
    left: bool,
}

/// One row.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// `worst`, `all` or nothing.
    pub class: &'static str,
    cells: Vec<Cell>,
}

#[derive(Debug, Clone, Serialize)]
struct Cell {
    text: String,
    value: String,
    class: &'static str,
}

impl Figure {
    /// A figure that says why there is nothing to show.
    pub fn missing(id: &'static str, title: &str, why: impl Into<String>) -> Self {
        Self {
            id,
            title: title.to_owned(),
            svg: None,
            missing: why.into(),
            reading: String::new(),
            n: String::new(),
            unit: String::new(),
            legend: Vec::new(),
            ramp: None,
            table: None,
        }
    }

    /// A figure with a picture, or none for the reason given.
    pub fn new(id: &'static str, title: &str, svg: Option<String>, why: &str) -> Self {
        Self { svg, ..Self::missing(id, title, why) }
    }

    /// What it says, over how many, in what.
    pub fn says(self, reading: String, n: String, unit: &str) -> Self {
        Self { reading, n, unit: unit.to_owned(), ..self }
    }

    /// With these curves named.
    pub fn legend(self, entries: impl IntoIterator<Item = (&'static str, &'static str, String)>) -> Self {
        Self { legend: entries.into_iter().map(|(kind, color, text)| Entry { kind, color, text }).collect(), ..self }
    }
}

impl Grids {
    /// The columns of a table that people are shown; at most `most` rows.
    pub fn of(id: &'static str, title: &str, columns: &[Column], most: usize) -> Self {
        let shown: Vec<&Column> = columns.iter().filter(|c| c.is_shown()).collect();
        let rows = shown.iter().map(|c| c.texts().len()).max().unwrap_or(0).min(most);
        let cell = |column: &&Column, row: usize| Cell {
            text: column.texts().get(row).cloned().unwrap_or_default(),
            value: column.values().get(row).filter(|v| v.parse::<f64>().is_ok()).cloned().unwrap_or_default(),
            class: if column.is_left() { "left text" } else { "" },
        };
        Self {
            id,
            title: title.to_owned(),
            intro: String::new(),
            columns: shown.iter().map(|c| Head { title: c.title().to_owned(), left: c.is_left() }).collect(),
            rows: (0..rows).map(|row| Row { class: "", cells: shown.iter().map(|c| cell(c, row)).collect() }).collect(),
        }
    }

    /// The values of a heat map.
    pub fn values(title: &str, corner: &str, grid: &Grid, show: impl Fn(f64) -> String) -> Self {
        let head = |title: &String| Head { title: title.clone(), left: false };
        let corner = corner.to_owned();
        let cell = |text: String| Cell { text, value: String::new(), class: "" };
        let row = |(name, values): (&String, &Vec<Option<f64>>)| Row {
            class: "",
            cells: std::iter::once(cell(name.clone()))
                .chain(values.iter().map(|v| cell(v.map_or_else(|| "-".to_owned(), &show))))
                .collect(),
        };
        Self {
            title: title.to_owned(),
            columns: std::iter::once(&corner).chain(&grid.columns).map(head).collect(),
            rows: grid.rows.iter().zip(&grid.values).map(row).collect(),
            ..Self::default()
        }
    }

    /// The values of curves over the same points.
    pub fn series(title: &str, x: &str, points: &[String], series: &[(&str, Vec<Option<f64>>)], show: impl Fn(f64) -> String) -> Self {
        let transposed = Grid {
            rows: points.to_vec(),
            columns: series.iter().map(|s| s.0.to_owned()).collect(),
            values: (0..points.len()).map(|i| series.iter().map(|s| s.1.get(i).copied().flatten()).collect()).collect(),
        };
        Self::values(title, x, &transposed, show)
    }
}
