//! The narrow frame: one row per request, layer and number of rows. polars groups it; nothing of polars leaves.

/// What to group by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The request.
    Request,
    /// The layer.
    Layer,
}

/// One row of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NarrowRow {
    /// Request as the trace numbers it.
    pub request: u32,
    /// Absolute layer.
    pub layer: u16,
    /// Rows per window.
    pub rows: u16,
    /// Windows.
    pub windows: u64,
    /// Sum of unions.
    pub union: u64,
    /// Sum of wasted experts.
    pub wasted: u64,
}

/// Sums of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Group {
    /// Request or layer.
    pub key: u32,
    /// Windows.
    pub windows: u64,
    /// Sum of unions.
    pub union: u64,
    /// Sum of wasted experts.
    pub wasted: u64,
}

impl Group {
    /// Mean union.
    pub fn union_mean(&self) -> Option<f64> {
        (self.windows > 0).then(|| self.union as f64 / self.windows as f64)
    }
}

#[cfg(feature = "analysis")]
mod engine {
    use super::{By, Group, NarrowRow};
    use polars::prelude::{Column, DataFrame, IntoLazy, PolarsResult, SortMultipleOptions, col, lit};

    fn frame(rows: &[NarrowRow]) -> PolarsResult<DataFrame> {
        DataFrame::new(
            rows.len(),
            vec![
                Column::new("request".into(), rows.iter().map(|r| r.request).collect::<Vec<u32>>()),
                Column::new("layer".into(), rows.iter().map(|r| u32::from(r.layer)).collect::<Vec<u32>>()),
                Column::new("rows".into(), rows.iter().map(|r| u32::from(r.rows)).collect::<Vec<u32>>()),
                Column::new("windows".into(), rows.iter().map(|r| r.windows).collect::<Vec<u64>>()),
                Column::new("union".into(), rows.iter().map(|r| r.union).collect::<Vec<u64>>()),
                Column::new("wasted".into(), rows.iter().map(|r| r.wasted).collect::<Vec<u64>>()),
            ],
        )
    }

    /// Groups the rows of windows of one length.
    pub fn group(rows: &[NarrowRow], length: u16, by: By) -> Result<Vec<Group>, String> {
        let key = match by {
            By::Request => "request",
            By::Layer => "layer",
        };
        let grouped = || -> PolarsResult<Vec<Group>> {
            let frame = frame(rows)?
                .lazy()
                .filter(col("rows").eq(lit(u32::from(length))))
                .group_by([col(key)])
                .agg([col("windows").sum(), col("union").sum(), col("wasted").sum()])
                .sort([key], SortMultipleOptions::default())
                .collect()?;
            let keys = frame.column(key)?.u32()?.into_no_null_iter();
            let sums = |name: &str| -> PolarsResult<Vec<u64>> { Ok(frame.column(name)?.u64()?.into_no_null_iter().collect()) };
            let sums = sums("windows")?.into_iter().zip(sums("union")?).zip(sums("wasted")?);
            Ok(keys.zip(sums).map(|(key, ((windows, union), wasted))| Group { key, windows, union, wasted }).collect())
        };
        grouped().map_err(|e| e.to_string())
    }
}

#[cfg(not(feature = "analysis"))]
mod engine {
    use super::{By, Group, NarrowRow, plain};

    /// Groups the rows of windows of one length.
    pub fn group(rows: &[NarrowRow], length: u16, by: By) -> Result<Vec<Group>, String> {
        Ok(plain(rows, length, by))
    }
}

/// Sums by request or layer over the windows of `length` rows, ascending by key.
///
/// # Errors
/// What the data-frame engine says.
pub fn group(rows: &[NarrowRow], length: u16, by: By) -> Result<Vec<Group>, String> {
    engine::group(rows, length, by)
}

/// The same by a plain map: for builds without the data-frame engine, and to check it.
#[cfg(any(test, not(feature = "analysis")))]
fn plain(rows: &[NarrowRow], length: u16, by: By) -> Vec<Group> {
    let mut groups = std::collections::BTreeMap::new();
    for row in rows.iter().filter(|r| r.rows == length) {
        let key = match by {
            By::Request => row.request,
            By::Layer => u32::from(row.layer),
        };
        let group: &mut Group = groups.entry(key).or_default();
        group.key = key;
        group.windows += row.windows;
        group.union += row.union;
        group.wasted += row.wasted;
    }
    groups.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn worked_example() {
        let row = |request, layer, rows, windows, union| NarrowRow { request, layer, rows, windows, union, wasted: 1 };
        let rows = [row(4, 2, 4, 10, 250), row(4, 3, 4, 10, 270), row(1, 2, 4, 2, 50), row(1, 2, 5, 7, 300)];
        let by = |by| group(&rows, 4, by).unwrap().iter().map(|g| (g.key, g.windows, g.union, g.wasted)).collect::<Vec<_>>();
        assert_eq!(by(By::Request), [(1, 2, 50, 1), (4, 20, 520, 2)]);
        assert_eq!(by(By::Layer), [(2, 12, 300, 2), (3, 10, 270, 1)]);
        assert_eq!(group(&rows, 9, By::Layer).unwrap(), []);
        assert_eq!(group(&[], 4, By::Layer).unwrap(), []);
    }

    proptest! {
        #[test]
        fn the_engine_agrees_with_a_plain_map(
            rows in prop::collection::vec((0u32..5, 0u16..4, 2u16..5, 0u64..100, 0u64..9000, 0u64..500), 0..60)
        ) {
            let row = |(request, layer, rows, windows, union, wasted)| NarrowRow { request, layer, rows, windows, union, wasted };
            let rows: Vec<NarrowRow> = rows.into_iter().map(row).collect();
            for by in [By::Request, By::Layer] {
                prop_assert_eq!(group(&rows, 3, by).unwrap(), plain(&rows, 3, by));
            }
        }
    }
}
