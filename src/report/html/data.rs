//! The report as JSON in the page, so that the page alone is enough to compute on.

use super::ROWS;
use crate::metric::report::Report;

/// Most bytes of it: pictures and tables of a large model take half as much again, and a page stays below 3 MB.
const LARGEST: usize = 1_400_000;

/// The report as JSON that cannot end the element it stands in, and what it is without, in words. Of lists that grow with the run only
/// the first [`ROWS`] entries are there; windows of other lengths than most, which make up most of a large report, give way first.
///
/// # Errors
/// When the report cannot be written as JSON.
pub fn data(report: &Report) -> Result<(String, Vec<String>), serde_json::Error> {
    let mut kept = report.clone();
    let mut without = Vec::new();
    let mut cut = |length: usize, what: &str| {
        if length > ROWS {
            without.push(format!("the {what} after the first {ROWS}"));
        }
    };
    cut(kept.by_request.len(), "requests");
    kept.by_request.truncate(ROWS);
    if let Some(groups) = &mut kept.groups {
        cut(groups.groups.len(), "groups");
        groups.groups.truncate(ROWS);
    }
    if let Some(advice) = &mut kept.advice {
        cut(advice.by_tag.len(), "tags of the advice");
        advice.by_tag.truncate(ROWS);
        advice.by_request.truncate(ROWS);
    }
    let mut json = serde_json::to_string(&kept)?;
    if json.len() > LARGEST && kept.layers.iter().any(|layer| !layer.by_rows.is_empty()) {
        kept.layers.iter_mut().for_each(|layer| layer.by_rows.clear());
        without.push("the layers' windows of other numbers of rows".to_owned());
        json = serde_json::to_string(&kept)?;
    }
    Ok((json.replace('<', "\\u003c"), without))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::text::tests::report;

    #[test]
    fn embedded_data_cannot_end_its_element() {
        let mut report = report();
        report.run.name = "</script><!-- x".into();
        let (data, without) = data(&report).unwrap();
        assert!(!data.contains('<') && data.contains("\\u003c/script>") && without.is_empty());
        assert_eq!(serde_json::from_str::<Report>(&data).unwrap(), report);
    }

    #[test]
    fn what_is_too_much_is_left_out_and_named() {
        let mut report = report();
        let template = report.by_request[0].clone();
        report.by_request.resize(ROWS + 1, template);
        let (short, without) = data(&report).unwrap();
        assert_eq!((without.as_slice(), short.len() < LARGEST), (&["the requests after the first 300".to_owned()][..], true));
        let other = report.layers[0].stats.clone();
        report.layers.iter_mut().for_each(|layer| layer.by_rows = vec![other.clone(); 1000]);
        let (data, without) = data(&report).unwrap();
        assert_eq!(without.len(), 2);
        assert!(without[1].contains("other numbers of rows") && data.len() < LARGEST);
        let read: Report = serde_json::from_str(&data).unwrap();
        assert_eq!((read.layers[0].stats.rows, read.layers[0].by_rows.len()), (report.layers[0].stats.rows, 0));
    }
}
