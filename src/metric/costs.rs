//! The cost table that `calibrate` measures: what a pass takes by its rows and its union.

use super::Interval;
use crate::trace::manifest::{ModelShape, Warning};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The value of `schema` in every table of this version.
pub const SCHEMA: &str = "specprof.costs/1";
/// Most cells that a table may have: more rows and unions than any window.
const MAX_CELLS: usize = 100_000;
/// Times that a pass can have, µs: no clock tells less than the first, nobody waits longer than the second, which is a day.
const TIMES: std::ops::RangeInclusive<f64> = 1e-3..=8.64e10;
/// Most kernels, by component and name, that a pass may have.
const MAX_KERNELS: usize = 10_000;
/// Rates of memory, GB/s.
const RATES: std::ops::RangeInclusive<f64> = 1e-3..=1e6;
/// Longest context of any model.
const MAX_CONTEXT: u32 = 1 << 28;

/// Times of passes of one model on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// [`SCHEMA`].
    pub schema: String,
    /// Who measured.
    pub written_by: String,
    /// The engine, as in a manifest.
    pub engine: String,
    /// The device's name.
    pub device: String,
    /// Whether the device was the tests' emulator: then there are no times.
    #[serde(default)]
    pub emulated: bool,
    /// By whose clock times are; `None` in tables of the first days, which are by the host's.
    #[serde(default)]
    pub timed_by: Option<TimedBy>,
    /// GB (10^9 bytes) that a device reads a second, by a kernel that does nothing else; `None` where that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_gb_per_s: Option<f64>,
    /// The model.
    pub model: MeasuredModel,
    /// Tokens in the caches before each pass.
    pub context_len: u32,
    /// Passes behind each cell.
    pub repeats: u32,
    /// Seed of the drawn experts.
    pub seed: u64,
    /// One draft by the model's own block, µs; `None` without such a block.
    pub draft: Option<Timed>,
    /// By rows, then union.
    pub cells: Vec<Cell>,
    /// What limited the times when they were measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// By whose clock a pass was timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimedBy {
    /// The host's: from the call to its return.
    Host,
    /// A device's, inside graphs: from the begin of the first kernel to the end of the last.
    Cupti,
    /// A device's, by an event after each kernel, without graphs: gaps between kernels count with them.
    Events,
}

/// What must be the same for a table to say something of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredModel {
    /// Its name.
    pub name: String,
    /// Layers with a router.
    pub moe_layers: u16,
    /// E.
    pub experts: u16,
    /// k.
    pub experts_per_token: u16,
    /// Hidden size.
    pub hidden_size: Option<u32>,
    /// Intermediate size of an expert.
    pub expert_size: Option<u32>,
    /// Stored format of the experts.
    pub quantisation: String,
    /// Whether its weights were made up.
    #[serde(default)]
    pub synthetic: bool,
}

impl MeasuredModel {
    /// What a table says of a trace's model.
    pub fn of(shape: &ModelShape) -> Self {
        Self {
            name: shape.name.clone(),
            moe_layers: shape.moe_layers.len() as u16,
            experts: shape.experts,
            experts_per_token: shape.experts_per_token,
            hidden_size: shape.hidden_size,
            expert_size: shape.expert_size,
            quantisation: shape.quantisation.clone(),
            synthetic: shape.synthetic,
        }
    }
}

/// A time, as the median of repeated passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// µs.
    pub us: f64,
    /// 95 % interval of the median; `None` of too few passes.
    pub ci95: Option<Interval>,
}

/// Passes of some rows that touch some experts in each routed layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// W.
    pub rows: u16,
    /// U: distinct experts, the same number in every routed layer.
    pub union: u16,
    /// The whole pass, from embedding to logits of every row; `None` on an emulated device.
    pub pass: Option<Timed>,
    /// Its parts, by component; medians, which need not add up. On a device those of its kernels, without copies.
    pub components: BTreeMap<String, Timed>,
    /// Kernels that a device ran for it, by component; empty on the CPU.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kernels: BTreeMap<String, u32>,
    /// The same by component and name, with their bytes; empty where nobody asked for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_kernel: Vec<KernelCost>,
}

/// All launches of one kernel for one component in a pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelCost {
    /// What they work for.
    pub component: String,
    /// Its name.
    pub kernel: String,
    /// How many there are.
    pub launches: u32,
    /// What they have to move, each byte once, by the formula in the kernel's source.
    pub bytes: Option<u64>,
    /// What they take together; `None` on an emulated device.
    pub time: Option<Timed>,
}

impl KernelCost {
    /// What moving its bytes takes at a rate in GB/s, µs: bytes / (10^3 GB/s). 43 MB at 4300 GB/s are 10 µs.
    pub fn floor_us(&self, gb_per_s: f64) -> Option<f64> {
        Some(self.bytes? as f64 / (gb_per_s * 1e3))
    }
}

impl Timed {
    /// The median of times in µs, and the interval between two of them that holds the true median 95 % of the time.
    ///
    /// Of n sorted times, the number below the true median is binomial (n, 1/2): the interval ends at the (n/2 ∓ 0.98 √n)-th, rounded
    /// outwards (0.98 = 1.96 / 2, counted from the middle of places 0 ... n - 1). Below 6 times no two of them reach 95 %. Nine times: 4 ∓ 2.94, so
    /// places 1 and 7 of 0 ... 8. `None` of no times.
    pub fn median(times: &mut [f64]) -> Option<Self> {
        times.sort_unstable_by(f64::total_cmp);
        let n = times.len();
        let us = match n {
            0 => return None,
            n if n % 2 == 1 => times[n / 2],
            n => f64::midpoint(times[n / 2 - 1], times[n / 2]),
        };
        let middle = (n as f64 - 1.0) / 2.0;
        let away = 0.98 * (n as f64).sqrt();
        let ci95 =
            (n >= 6).then(|| [(middle - away).floor().max(0.0), (middle + away).ceil().min(n as f64 - 1.0)].map(|at| times[at as usize]));
        Some(Self { us, ci95 })
    }

    fn check(&self, what: &str) -> Result<(), String> {
        let number = |x: f64| TIMES.contains(&x);
        if !number(self.us) {
            return Err(format!("{what}: {:e} µs are no time of a pass", self.us));
        }
        match self.ci95 {
            Some([low, high]) if !(number(low) && number(high) && low <= self.us && self.us <= high) => {
                Err(format!("{what}: the interval {low} to {high} does not hold its {} µs", self.us))
            }
            _ => Ok(()),
        }
    }
}

impl CostTable {
    /// Reads a table.
    ///
    /// # Errors
    /// What is wrong with the text, without the file's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("is no JSON: {e}"))?;
        match value.get("schema").and_then(serde_json::Value::as_str) {
            Some(SCHEMA) => {}
            Some(other) => return Err(format!("has schema `{}`, not {SCHEMA}", other.chars().take(40).collect::<String>())),
            None => return Err(format!("is no cost table: it has no schema {SCHEMA}; `specprof calibrate --json` writes one")),
        }
        let table: Self = serde_json::from_value(value).map_err(|e| format!("is no cost table: {e}"))?;
        table.check()?;
        Ok(table)
    }

    fn check(&self) -> Result<(), String> {
        let m = &self.model;
        if m.experts_per_token == 0 || m.experts_per_token > m.experts || m.moe_layers == 0 {
            return Err(format!("its model has {} experts, top {}, in {} layers", m.experts, m.experts_per_token, m.moe_layers));
        }
        if self.repeats == 0 || self.context_len > MAX_CONTEXT {
            return Err(format!("has {} passes a cell after {} tokens of context", self.repeats, self.context_len));
        }
        if self.cells.is_empty() || self.cells.len() > MAX_CELLS {
            return Err(format!("has {} cells, not 1 to {MAX_CELLS}", self.cells.len()));
        }
        let mut seen = BTreeSet::new();
        for cell in &self.cells {
            let (what, k) = (format!("cell of {} rows and {} experts", cell.rows, cell.union), u32::from(m.experts_per_token));
            let most = (u32::from(cell.rows) * k).min(u32::from(m.experts));
            if cell.rows == 0 || !(k..=most).contains(&u32::from(cell.union)) {
                return Err(format!("{what}: such rows have {k} to {most} distinct experts"));
            }
            if !seen.insert((cell.rows, cell.union)) {
                return Err(format!("{what}: is there twice"));
            }
            match cell.pass {
                Some(pass) if !self.emulated => pass.check(&what)?,
                None if !self.emulated => return Err(format!("{what}: has no time")),
                None if cell.components.is_empty() && self.draft.is_none() && cell.by_kernel.iter().all(|k| k.time.is_none()) => {}
                _ => return Err(format!("{what}: has times, and an emulated device has none")),
            }
            cell.components.iter().try_for_each(|(name, time)| time.check(&format!("{what}, {name}")))?;
            if cell.by_kernel.len() > MAX_KERNELS {
                return Err(format!("{what}: has {} kernels, more than {MAX_KERNELS}", cell.by_kernel.len()));
            }
            cell.by_kernel.iter().try_for_each(|k| k.time.iter().try_for_each(|time| time.check(&format!("{what}, {}", k.kernel))))?;
        }
        if self.stream_gb_per_s.is_some_and(|rate| self.emulated || !RATES.contains(&rate)) {
            return Err("has a rate of its memory that no device has".to_owned());
        }
        if self.decode().is_none() {
            return Err(format!("has no cell of 1 row and {} experts, a decode pass", m.experts_per_token));
        }
        self.draft.iter().try_for_each(|time| time.check("draft"))
    }

    /// The cell of a plain decode pass: one row, k experts.
    pub fn decode(&self) -> Option<&Cell> {
        self.cells.iter().find(|c| c.rows == 1 && c.union == self.model.experts_per_token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cell(rows: u16, union: u16, us: f64) -> Cell {
        Cell {
            rows,
            union,
            pass: Some(Timed { us, ci95: Some([us - 1.0, us + 1.0]) }),
            components: BTreeMap::new(),
            kernels: BTreeMap::new(),
            by_kernel: Vec::new(),
        }
    }

    fn table() -> CostTable {
        CostTable {
            schema: SCHEMA.into(),
            written_by: "test".into(),
            engine: "test".into(),
            device: "test".into(),
            emulated: false,
            timed_by: Some(TimedBy::Host),
            stream_gb_per_s: None,
            model: MeasuredModel {
                name: "m".into(),
                moe_layers: 2,
                experts: 8,
                experts_per_token: 2,
                hidden_size: None,
                expert_size: None,
                quantisation: "bf16".into(),
                synthetic: false,
            },
            context_len: 16,
            repeats: 9,
            seed: 0,
            draft: Some(Timed { us: 5.0, ci95: None }),
            cells: vec![cell(1, 2, 10.0), cell(3, 2, 12.0), cell(3, 6, 20.0)],
            warnings: Vec::new(),
        }
    }

    #[test]
    fn worked_example_of_a_median() {
        let mut nine: Vec<f64> = (1..=9).rev().map(f64::from).collect();
        assert_eq!(Timed::median(&mut nine), Some(Timed { us: 5.0, ci95: Some([2.0, 8.0]) }));
        assert_eq!(Timed::median(&mut [4.0, 1.0]), Some(Timed { us: 2.5, ci95: None }));
        assert_eq!(Timed::median(&mut []), None);
    }

    #[test]
    fn the_interval_of_a_median_holds_it_as_often_as_it_says() {
        // 15 times uniform in 0..1, whose true median is 1/2, 4000 times over.
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let held = (0..4000).filter(|_| {
            let mut times: Vec<f64> = (0..15).map(|_| next()).collect();
            let [low, high] = Timed::median(&mut times).unwrap().ci95.unwrap();
            low <= 0.5 && 0.5 <= high
        });
        // Rounded outwards: 96.5 % for 15.
        assert!((3780..3980).contains(&held.count()));
    }

    #[test]
    fn a_table_comes_back_and_what_is_impossible_is_named() {
        let good = table();
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(CostTable::parse(&text), Ok(good));
        let wrong = |change: fn(&mut CostTable)| {
            let mut table = table();
            change(&mut table);
            CostTable::parse(&serde_json::to_string(&table).unwrap()).unwrap_err()
        };
        assert!(wrong(|t| t.cells[1].union = 7).contains("cell of 3 rows and 7 experts: such rows have 2 to 6"));
        assert!(wrong(|t| t.cells[2].union = 2).contains("twice"));
        assert!(wrong(|t| t.cells[0].rows = 2).contains("a decode pass"));
        assert!(wrong(|t| t.cells[0].pass = Some(Timed { us: 0.0, ci95: None })).contains("no time"));
        assert!(wrong(|t| t.cells[2].pass = Some(Timed { us: 1e308, ci95: None })).contains("no time"));
        assert!(wrong(|t| t.cells[2].pass = None).contains("cell of 3 rows and 6 experts: has no time"));
        assert!(wrong(|t| t.emulated = true).contains("has times, and an emulated device has none"));
        assert!(wrong(|t| t.repeats = 0).contains("0 passes"));
        assert!(wrong(|t| t.cells[0].pass = Some(Timed { us: 10.0, ci95: Some([11.0, 9.0]) })).contains("does not hold"));
        assert!(wrong(|t| t.model.experts_per_token = 9).contains("top 9"));
        assert!(wrong(|t| t.cells.clear()).contains("0 cells"));
        assert!(wrong(|t| t.schema = "x".into()).contains("schema `x`"));
        assert!(wrong(|t| t.stream_gb_per_s = Some(0.0)).contains("rate of its memory"));
        let kernel = KernelCost { component: "head".into(), kernel: "dense".into(), launches: 1, bytes: Some(43_000_000), time: None };
        assert_eq!(kernel.floor_us(4300.0), Some(10.0));
        assert_eq!(KernelCost { bytes: None, ..kernel }.floor_us(4300.0), None);
        // Counts of an emulated device are a table, and its times are none.
        let mut counted = table();
        (counted.emulated, counted.draft) = (true, None);
        counted.cells.iter_mut().for_each(|cell| (cell.pass, cell.kernels) = (None, [("experts".to_owned(), 3)].into()));
        assert_eq!(CostTable::parse(&serde_json::to_string(&counted).unwrap()), Ok(counted.clone()));
        counted.draft = Some(Timed { us: 5.0, ci95: None });
        assert!(CostTable::parse(&serde_json::to_string(&counted).unwrap()).unwrap_err().contains("an emulated device has none"));
        assert!(CostTable::parse("{}").unwrap_err().contains("calibrate"));
        assert!(CostTable::parse("[").unwrap_err().contains("no JSON"));
    }

    proptest! {
        #[test]
        fn a_median_is_between_its_ends(times in prop::collection::vec(0.001f64..1e9, 1..60)) {
            let (mut sorted, n) = (times.clone(), times.len());
            let median = Timed::median(&mut sorted).unwrap();
            let below = times.iter().filter(|t| **t < median.us).count();
            let above = times.iter().filter(|t| **t > median.us).count();
            prop_assert!(below <= n / 2 && above <= n / 2);
            prop_assert_eq!(median.ci95.is_some(), n >= 6);
            prop_assert!(median.check("x").is_ok());
        }
    }
}
