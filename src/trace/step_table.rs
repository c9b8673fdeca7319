//! `steps` as plain columns. Its numbers and its lists are read side by side: a report waits for them before its routes.

use super::bounds::Budget;
use super::part_file::PartHandle;
use super::schema::{self, col};
use super::tables::{Rows, read_part, roots};
use super::{Phase, StepEvent, StepRoutes, TraceError};
use arrow_array::types::{Float32Type, Int16Type, Int64Type, UInt16Type, UInt32Type};
use arrow_schema::{DataType, Schema};

/// Lists of numbers, one a row, end to end.
#[derive(Debug, Clone, PartialEq)]
pub struct Lists<T> {
    values: Vec<T>,
    ends: Vec<usize>,
}

impl<T> Default for Lists<T> {
    fn default() -> Self {
        Self { values: Vec::new(), ends: Vec::new() }
    }
}

impl<T: Copy> Lists<T> {
    fn push(&mut self, list: &[T]) {
        self.values.extend_from_slice(list);
        self.ends.push(self.values.len());
    }

    /// The list of a row; empty beyond the end and where there is none.
    pub fn get(&self, row: usize) -> &[T] {
        let Some(&end) = self.ends.get(row) else { return &[] };
        let begin = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.values[begin..end]
    }

    /// All lists end to end.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Number of lists.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// `steps`, one vector a column, in order of `step_id`.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "as the fields of StepEvent")]
pub struct Steps {
    pub step_id: Vec<u32>,
    pub request_id: Vec<u32>,
    pub phase: Vec<Phase>,
    pub rows: Vec<u16>,
    pub accepted: Vec<u16>,
    pub context_len: Vec<u32>,
    pub host_begin_ns: Vec<i64>,
    pub host_end_ns: Vec<i64>,
    pub draft_host_ns: Vec<i64>,
    pub target_host_ns: Vec<i64>,
    pub device_ns: Vec<Option<i64>>,
    /// Whether the host times are known; they are all 0 and mean nothing otherwise.
    pub host_times: bool,
    /// `None` where a step had a pass to itself, and everywhere in traces before 1.2.
    pub pass_id: Vec<Option<u32>>,
    pub emitted_tokens: Lists<u32>,
    /// Empty unless asked for.
    pub input_tokens: Lists<u32>,
    /// `None` for a chain. Empty unless asked for.
    pub parents: Vec<Option<Vec<i16>>>,
    pub draft_probs: Vec<Option<Vec<f32>>>,
    /// Empty unless asked for.
    pub draft_confidences: Vec<Option<Vec<f32>>>,
}

impl Steps {
    /// Number of steps.
    pub fn len(&self) -> usize {
        self.step_id.len()
    }

    /// Whether there is no step.
    pub fn is_empty(&self) -> bool {
        self.step_id.is_empty()
    }

    /// The step at an index, without its routes; `None` beyond the last one. All columns must have been read.
    pub fn event(&self, at: usize) -> Option<StepEvent> {
        Some(StepEvent {
            step_id: *self.step_id.get(at)?,
            request_id: *self.request_id.get(at)?,
            phase: *self.phase.get(at)?,
            accepted: *self.accepted.get(at)?,
            context_len: *self.context_len.get(at)?,
            input_tokens: self.input_tokens.get(at).to_vec(),
            parents: self.parents.get(at)?.clone(),
            emitted_tokens: self.emitted_tokens.get(at).to_vec(),
            draft_probs: self.draft_probs.get(at)?.clone(),
            draft_confidences: self.draft_confidences.get(at)?.clone(),
            pass_id: *self.pass_id.get(at)?,
            host_begin_ns: *self.host_begin_ns.get(at)?,
            host_end_ns: *self.host_end_ns.get(at)?,
            draft_host_ns: *self.draft_host_ns.get(at)?,
            target_host_ns: *self.target_host_ns.get(at)?,
            device_ns: *self.device_ns.get(at)?,
            routes: StepRoutes::default(),
        })
    }
}

/// Reads `steps`, with input tokens, parents and confidences when `details` are wanted. `times` says whether host times are known,
/// `bytes` are those of all tables: of tokens that nobody has named, hardly any are in this one.
pub(super) fn read_steps(parts: &[PartHandle], bytes: u64, details: bool, times: bool) -> Result<Steps, TraceError> {
    // A column that is missing is said before what is wrong within others.
    for part in parts {
        roots(part, schema::STEPS, &number_columns(part, times))?;
        roots(part, schema::STEPS, &list_columns(parts, details))?;
    }
    let (numbers, lists) = rayon::join(|| read_numbers(parts, times), || read_lists(parts, bytes, details));
    let (numbers, lists) = (numbers?, lists?);
    Ok(Steps {
        emitted_tokens: lists.emitted_tokens,
        input_tokens: lists.input_tokens,
        parents: lists.parents,
        draft_probs: lists.draft_probs,
        draft_confidences: lists.draft_confidences,
        ..numbers
    })
}

/// The columns of `steps` that are lists, or are none, and that `wanted` asks for.
fn columns(times: bool, lists: bool, wanted: impl Fn(&str) -> bool) -> Schema {
    let all = schema::steps(times);
    let of = all.fields().iter().filter(|f| matches!(f.data_type(), DataType::List(_)) == lists && wanted(f.name()));
    Schema::new(of.cloned().collect::<Vec<_>>())
}

fn has_column(part: &PartHandle, name: &str) -> bool {
    part.metadata.schema().field_with_name(name).is_ok()
}

fn number_columns(part: &PartHandle, times: bool) -> Schema {
    // Traces before 1.2 have no such column.
    columns(times, false, |name| name != col::PASS_ID || has_column(part, col::PASS_ID))
}

fn has_confidences(parts: &[PartHandle]) -> bool {
    parts.iter().all(|part| has_column(part, col::DRAFT_CONFIDENCES))
}

fn list_columns(parts: &[PartHandle], details: bool) -> Schema {
    // Whether there are times does not matter to lists.
    columns(true, true, |name| match name {
        col::PARENTS | col::INPUT_TOKENS => details,
        col::DRAFT_CONFIDENCES => details && has_confidences(parts),
        _ => true,
    })
}

fn read_numbers(parts: &[PartHandle], times: bool) -> Result<Steps, TraceError> {
    let mut steps = Steps { host_times: times, ..Steps::default() };
    let host = |rows: &Rows<'_>, name: &str| {
        // Whatever stands in a column that the manifest calls unknown is not read.
        if times { rows.numbers::<Int64Type>(name) } else { rows.maybe_numbers::<Int64Type>(name).map(|values| vec![0; values.len()]) }
    };
    let mut budget = Budget::new(schema::STEPS, parts)?;
    for part in parts {
        let has_passes = has_column(part, col::PASS_ID);
        read_part(part, schema::STEPS, &number_columns(part, times), &mut budget, |rows, _| {
            let first = steps.len();
            steps.step_id.extend(rows.numbers::<UInt32Type>(col::STEP_ID)?);
            steps.request_id.extend(rows.numbers::<UInt32Type>(col::REQUEST_ID)?);
            steps.phase.extend(rows.words(col::PHASE, Phase::parse)?);
            steps.rows.extend(rows.numbers::<UInt16Type>(col::ROWS)?);
            steps.accepted.extend(rows.numbers::<UInt16Type>(col::ACCEPTED)?);
            steps.context_len.extend(rows.numbers::<UInt32Type>(col::CONTEXT_LEN)?);
            steps.host_begin_ns.extend(host(rows, col::HOST_BEGIN_NS)?);
            steps.host_end_ns.extend(host(rows, col::HOST_END_NS)?);
            steps.draft_host_ns.extend(host(rows, col::DRAFT_HOST_NS)?);
            steps.target_host_ns.extend(host(rows, col::TARGET_HOST_NS)?);
            steps.device_ns.extend(rows.maybe_numbers::<Int64Type>(col::DEVICE_NS)?);
            let passes = if has_passes { rows.maybe_numbers::<UInt32Type>(col::PASS_ID)? } else { Vec::new() };
            steps.pass_id.extend(passes);
            steps.pass_id.resize(steps.step_id.len(), None);
            let before = first.saturating_sub(1);
            match (before + 1..steps.step_id.len()).find(|&i| steps.step_id[i] <= steps.step_id[i - 1]) {
                Some(i) if i >= first => Err(rows.error(i - first, &format!("step {} is out of order", steps.step_id[i]))),
                _ => Ok(()),
            }
        })?;
    }
    Ok(steps)
}

/// [`Steps`] with nothing but its lists.
fn read_lists(parts: &[PartHandle], bytes: u64, details: bool) -> Result<Steps, TraceError> {
    let mut steps = Steps::default();
    let confidences = details && has_confidences(parts);
    let wanted = list_columns(parts, details);
    let mut budget = Budget::new(schema::STEPS, parts)?.with_lists_of(bytes);
    for part in parts {
        read_part(part, schema::STEPS, &wanted, &mut budget, |rows, _| {
            rows.lists::<UInt32Type>(col::EMITTED_TOKENS, |list| {
                steps.emitted_tokens.push(list.unwrap_or_default());
                list.is_some()
            })?;
            rows.lists::<Float32Type>(col::DRAFT_PROBS, |list| {
                steps.draft_probs.push(list.map(<[f32]>::to_vec));
                true
            })?;
            if !details {
                return Ok(());
            }
            rows.lists::<UInt32Type>(col::INPUT_TOKENS, |list| {
                steps.input_tokens.push(list.unwrap_or_default());
                list.is_some()
            })?;
            rows.lists::<Int16Type>(col::PARENTS, |list| {
                steps.parents.push(list.map(<[i16]>::to_vec));
                true
            })?;
            if confidences {
                rows.lists::<Float32Type>(col::DRAFT_CONFIDENCES, |list| {
                    steps.draft_confidences.push(list.map(<[f32]>::to_vec));
                    true
                })?;
            } else {
                steps.draft_confidences.resize(steps.emitted_tokens.len(), None);
            }
            Ok(())
        })?;
    }
    Ok(steps)
}
