//! The comparison for machines: `specprof.diff/1`, described in `reports/schema/diff.v1.schema.json`.

use super::super::compare::{Method, OneSided, Row, Verdict};
use super::super::gate::{Finding, Gate, Status};
use super::super::kind::Difference;
use super::super::routing::Disagreement;
use super::super::rules::Origin;
use super::super::{Comparison, SCHEMA};
use crate::metric::report::RunFacts;
use crate::metric::{Better, Interval, Noise};
use crate::report::json::pretty;
use crate::trace::manifest::Warning;
use serde::Serialize;
use serde_json::{Value, json};

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    failed: bool,
    base: Value,
    candidate: Value,
    pairing: Value,
    allowed: &'a [Difference],
    margin: f64,
    strict: bool,
    gates: Vec<Value>,
    metrics: Vec<Metric<'a>>,
    one_sided: &'a OneSided,
    routing: &'a Option<Disagreement>,
    warnings: &'a [Warning],
}

#[derive(Serialize)]
struct Metric<'a> {
    layer: Option<u16>,
    path: &'a str,
    unit: &'static str,
    better: &'static str,
    noise: &'static str,
    base: f64,
    candidate: f64,
    verdict: Verdict,
    method: Method,
    change: f64,
    change_ci95: Option<Interval>,
    relative: Option<f64>,
    relative_ci95: Option<Interval>,
    p: Option<f64>,
    q: Option<f64>,
    detectable: Option<f64>,
    note: Option<&'static str>,
    noisy_times: bool,
}

fn metric(row: &Row) -> Metric<'_> {
    Metric {
        layer: row.layer,
        path: &row.path,
        unit: row.metric.unit.name(),
        better: match row.metric.better {
            Better::Lower => "lower",
            Better::Higher => "higher",
            Better::Neither => "neither",
        },
        noise: match row.metric.noise {
            Noise::Exact => "exact",
            Noise::Noisy => "noisy",
        },
        base: row.base.value,
        candidate: row.candidate.value,
        verdict: row.verdict,
        method: row.method,
        change: row.difference(),
        change_ci95: row.change.map(|shift| shift.interval()),
        relative: row.relative(),
        relative_ci95: row.relative_interval().filter(finite),
        p: row.p,
        q: row.q,
        detectable: row.detectable(),
        note: row.note,
        noisy_times: row.noisy_times,
    }
}

fn finite(limits: &Interval) -> bool {
    limits.iter().all(|v| v.is_finite())
}

fn run(run: &RunFacts, requests: u64) -> Value {
    json!({
        "name": run.name,
        "written_by": run.written_by,
        "complete": run.complete,
        "model": run.model.name,
        "identity": run.model.identity,
        "quantisation": run.model.quantisation,
        "drafter": run.drafter.kind,
        "draft_len": run.drafter.draft_len,
        "engine": run.engine,
        "device": format!("{} {}", run.device.kind, run.device.name),
        "emulated": run.emulated,
        "token_hash": run.token_hash,
        "requests": requests,
    })
}

fn gate(gate: &Gate) -> Value {
    let (source, line) = match &gate.origin {
        Origin::Default => ("default".to_owned(), None),
        Origin::CommandLine => ("command_line".to_owned(), None),
        Origin::File { path, line } => (path.display().to_string(), Some(*line)),
    };
    let finding = |f: &Finding| {
        json!({"name": f.name, "value": f.value, "ci95": f.interval.filter(finite), "q": f.q, "beyond": f.beyond, "failed": f.failed,
               "unclear": f.unclear, "noisy_times": f.noisy_times})
    };
    let status: Status = gate.status;
    json!({
        "rule": gate.rule.to_string(),
        "source": source,
        "line": line,
        "status": status,
        "findings": gate.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}

/// The comparison as indented JSON, ending in a newline.
///
/// # Errors
/// Never for a comparison made by this crate.
pub fn render(c: &Comparison) -> Result<String, serde_json::Error> {
    let pairing = json!({
        "prompts_known": c.pairing.known,
        "paired": c.pairing.is_paired(),
        "exact": c.pairing.is_exact_for(Noise::Exact),
        "same_output": c.pairing.is_paired() && c.pairing.same_output,
        "pairs": c.pairing.pairs.len(),
        "only_base": c.pairing.only_base,
        "only_candidate": c.pairing.only_candidate,
    });
    let document = Document {
        schema: SCHEMA,
        failed: c.failed(),
        base: run(&c.base, c.requests.0),
        candidate: run(&c.candidate, c.requests.1),
        pairing,
        allowed: &c.differences,
        margin: c.options.margin,
        strict: c.options.strict,
        gates: c.gates.iter().map(gate).collect(),
        metrics: c.rows.iter().map(metric).collect(),
        one_sided: &c.one_sided,
        routing: &c.routing,
        warnings: &c.warnings,
    };
    pretty(&document)
}
