//! Forward passes that steps of several requests share: the rules of `steps.pass_id`.

use std::collections::HashSet;

/// Follows the steps of a trace through their passes.
#[derive(Debug, Clone, Default)]
pub struct PassOrder {
    /// The largest number so far.
    last: Option<u32>,
    /// Requests of the pass that the last step was in; empty when it had one to itself.
    requests: HashSet<u32>,
}

impl PassOrder {
    /// Takes the next step; gives whether a new pass begins with it.
    ///
    /// # Errors
    /// What is wrong, when the number falls, the steps of a pass do not come one after the other, or a request is in a pass
    /// twice. The step is not taken then.
    pub fn next(&mut self, pass: Option<u32>, request: u32) -> Result<bool, String> {
        let Some(pass) = pass else {
            self.requests.clear();
            return Ok(true);
        };
        let goes_on = self.last == Some(pass) && !self.requests.is_empty();
        if !goes_on && self.last.is_some_and(|last| last >= pass) {
            return Err(format!("its pass {pass} does not come together, or comes after a later one"));
        }
        if !goes_on {
            self.requests.clear();
        }
        if !self.requests.insert(request) {
            return Err(format!("request {request} is twice in pass {pass}"));
        }
        self.last = Some(pass);
        Ok(!goes_on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example() {
        let mut order = PassOrder::default();
        let steps = [(Some(0), 1), (Some(0), 2), (None, 1), (Some(4), 2), (Some(4), 1), (Some(5), 1)];
        assert_eq!(steps.map(|(pass, request)| order.next(pass, request)), [true, false, true, true, false, true].map(Ok));
        for (pass, what) in [(4, "later one"), (5, "twice")] {
            assert!(order.next(Some(pass), 1).unwrap_err().contains(what));
        }
        // A refused step leaves everything as it was.
        assert_eq!(order.next(Some(5), 3), Ok(false));
        assert_eq!(order.next(None, 3), Ok(true));
        assert!(order.next(Some(5), 4).unwrap_err().contains("come together"));
    }
}
