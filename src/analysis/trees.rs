//! Windows that are trees: where their rows hang, and which of them were accepted.
//!
//! The trace says how many drafts of a window were accepted, and which tokens the step emitted. Of a tree, the accepted
//! drafts are a path from the anchor whose tokens are those emitted. Where several paths fit, or none, the kept rows are
//! not known.

use super::AnalysisError;
use crate::trace::event::wrong_parent;

/// A token that the producer did not give: it may be any.
const UNKNOWN_TOKEN: u32 = u32::MAX;

/// The shape of one window that is not a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    parent: Box<[i16]>,
    depth: Box<[u16]>,
    order: Box<[u16]>,
    path: Option<Box<[u16]>>,
}

impl Shape {
    /// The shape of a window whose row i continues row `parents[i]`, of which nothing is known to be kept. A chain has one, too.
    ///
    /// # Errors
    /// What is wrong with the parents.
    pub fn new(parents: &[i16]) -> Result<Self, String> {
        if let Some((row, parent)) = wrong_parent(parents) {
            return Err(format!("row {row} continues row {parent}, which is not before it"));
        }
        let mut depth: Vec<u16> = Vec::with_capacity(parents.len());
        for &parent in parents {
            // Parents come first, and rows are numbered by i16: a depth is below 2^15.
            let above = usize::try_from(parent).ok().and_then(|p| depth.get(p).copied());
            depth.push(above.map_or(0, |d| d + 1));
        }
        let mut order: Vec<u16> = (0..).take(parents.len()).collect();
        order.sort_by_key(|&row| (depth[usize::from(row)], row));
        Ok(Self { parent: parents.into(), depth: depth.into(), order: order.into(), path: None })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.parent.len()
    }

    /// Number of ancestors of each row; 0 for the anchor.
    pub fn depth(&self) -> &[u16] {
        &self.depth
    }

    /// The rows by depth, then by number.
    pub fn order(&self) -> &[u16] {
        &self.order
    }

    /// The depth of the deepest row: most drafts that can be accepted.
    pub fn deepest(&self) -> u16 {
        self.order.last().and_then(|&row| self.depth.get(usize::from(row))).copied().unwrap_or(0)
    }

    /// The row that a row continues; `None` for the anchor.
    pub fn parent(&self, row: u16) -> Option<u16> {
        self.parent.get(usize::from(row)).and_then(|&parent| u16::try_from(parent).ok())
    }

    /// Whether every row continues the one before.
    pub fn is_chain(&self) -> bool {
        (-1i32..).zip(&self.parent).all(|(before, &parent)| i32::from(parent) == before)
    }

    /// The accepted rows from the anchor on; `None` where they are not known.
    pub fn path(&self) -> Option<&[u16]> {
        self.path.as_deref()
    }

    /// The same with accepted rows that are known: from the anchor on, each continuing the one before.
    ///
    /// # Errors
    /// When they are no such path.
    pub fn along(mut self, path: &[u16]) -> Result<Self, String> {
        let goes_on = |pair: &[u16]| usize::from(pair[1]) < self.rows() && self.parent(pair[1]) == Some(pair[0]);
        if path.first() != Some(&0) || !path.windows(2).all(goes_on) {
            return Err("its accepted rows are no path".into());
        }
        self.path = Some(path.into());
        Ok(self)
    }

    /// The row that each row continues; -1 for the anchor.
    pub fn parents(&self) -> &[i16] {
        &self.parent
    }

    /// Finds the accepted rows: the only way down from the anchor by `accepted` rows whose tokens are the emitted ones.
    ///
    /// `tokens` are the rows' tokens. Emitted tokens that are missing, because the request ended, may be any, as those that
    /// the producer did not give. Rows 0, 1, 2 with parents -1, 0, 0 and tokens 7, 8, 9, one accepted, emitted 9: rows 0 and 2.
    #[must_use]
    pub fn accepting(mut self, tokens: &[u32], emitted: &[u32], accepted: u16) -> Self {
        let fits = |row: usize, depth: u16| {
            let known = |token: Option<&u32>| token.copied().filter(|&t| t != UNKNOWN_TOKEN);
            let wanted = known(emitted.get(usize::from(depth) - 1));
            wanted.is_none() || known(tokens.get(row)).is_none_or(|token| Some(token) == wanted)
        };
        let mut reached = vec![false; self.rows()];
        let mut ends = Vec::new();
        for row in 0..self.rows() {
            let depth = self.depth[row];
            let parent = self.parent(row as u16);
            reached[row] = depth <= accepted && parent.is_none_or(|p| reached[usize::from(p)] && fits(row, depth));
            if reached[row] && depth == accepted {
                ends.push(row as u16);
            }
        }
        self.path = match ends[..] {
            [end] => {
                let mut path: Vec<u16> = std::iter::successors(Some(end), |&row| self.parent(row)).collect();
                path.reverse();
                Some(path.into())
            }
            _ => None,
        };
        self
    }
}

/// The windows of a trace that are trees, by index of their step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trees {
    /// By step: one more than the place of its shape, 0 for a chain. Ends behind the last tree.
    of_step: Vec<u32>,
    shapes: Vec<Shape>,
}

/// What `steps` says of a window.
#[derive(Debug, Clone, Copy)]
pub struct TreeRow<'a> {
    /// The step.
    pub step_id: u32,
    /// Its rows.
    pub rows: u16,
    /// The row that each row continues.
    pub parents: &'a [i16],
    /// The rows' tokens.
    pub tokens: &'a [u32],
    /// The step's emitted tokens.
    pub emitted: &'a [u32],
    /// Number of accepted drafts.
    pub accepted: u16,
}

impl Trees {
    /// Adds the window of the step at `at`, behind those before, unless it is a chain.
    ///
    /// # Errors
    /// [`AnalysisError::Steps`] when its rows cannot be a tree, or one that deep.
    pub fn add(&mut self, at: usize, row: TreeRow<'_>) -> Result<(), AnalysisError> {
        let wrong = |reason: String| AnalysisError::Steps { step: row.step_id, reason: format!("parents: {reason}") };
        if row.parents.len() != usize::from(row.rows) {
            return Err(wrong(format!("{} of them for {} rows", row.parents.len(), row.rows)));
        }
        let shape = Shape::new(row.parents).map_err(wrong)?;
        if shape.is_chain() {
            return Ok(());
        }
        if row.accepted > shape.deepest() {
            return Err(wrong(format!("{} drafts accepted of a tree of {} below its anchor", row.accepted, shape.deepest())));
        }
        self.put(at, shape.accepting(row.tokens, row.emitted, row.accepted));
        Ok(())
    }

    /// Adds the tree of the step at `at`, behind those before.
    pub fn put(&mut self, at: usize, shape: Shape) {
        self.shapes.push(shape);
        self.of_step.resize(at + 1, 0);
        self.of_step[at] = u32::try_from(self.shapes.len()).unwrap_or(0);
    }

    /// The trees, each with the index of its step, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Shape)> {
        (0..self.of_step.len()).filter_map(|at| Some((at, self.get(at)?)))
    }

    /// The tree of the step at `at`; `None` for a chain.
    #[inline]
    pub fn get(&self, at: usize) -> Option<&Shape> {
        self.shapes.get((*self.of_step.get(at)? as usize).checked_sub(1)?)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// Number of trees.
    pub fn len(&self) -> usize {
        self.shapes.len()
    }

    /// Whether the accepted rows of the step at `at` are not known.
    pub fn is_path_unknown(&self, at: usize) -> bool {
        self.get(at).is_some_and(|shape| shape.path().is_none())
    }

    /// Indices of the steps whose accepted rows are not known, ascending.
    pub fn unknown_paths(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.of_step.len()).filter(|&at| self.is_path_unknown(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A binary tree of two levels below the anchor, its rows in depth-first order.
    const PARENTS: [i16; 7] = [-1, 0, 1, 1, 0, 4, 4];
    const TOKENS: [u32; 7] = [5, 10, 20, 21, 11, 20, 22];

    fn path(tokens: &[u32], emitted: &[u32], accepted: u16) -> Option<Vec<u16>> {
        Shape::new(&PARENTS).unwrap().accepting(tokens, emitted, accepted).path().map(<[u16]>::to_vec)
    }

    #[test]
    fn worked_example() {
        let shape = Shape::new(&PARENTS).unwrap();
        assert_eq!((shape.depth(), shape.order(), shape.deepest()), (&[0, 1, 2, 2, 1, 2, 2][..], &[0, 1, 4, 2, 3, 5, 6][..], 2));
        assert!(!shape.is_chain() && Shape::new(&[-1, 0, 1]).unwrap().is_chain());
        // The same token hangs under both branches: the branch decides.
        assert_eq!(path(&TOKENS, &[11, 20, 1], 2), Some(vec![0, 4, 5]));
        assert_eq!(path(&TOKENS, &[10, 21, 1], 2), Some(vec![0, 1, 3]));
        assert_eq!(path(&TOKENS, &[11, 99], 1), Some(vec![0, 4]));
        assert_eq!(path(&TOKENS, &[99], 0), Some(vec![0]));
    }

    #[test]
    fn what_is_not_told_is_not_guessed() {
        // Neither branch, both, or one that emitted tokens cannot tell.
        assert_eq!(path(&TOKENS, &[12, 20, 1], 2), None);
        assert_eq!(path(&[5, 10, 20, 21, 10, 20, 22], &[10, 20, 1], 2), None);
        assert_eq!(path(&TOKENS, &[11], 2), None);
        assert_eq!(path(&TOKENS, &[UNKNOWN_TOKEN, UNKNOWN_TOKEN, 3], 2), None);
        assert_eq!(path(&[UNKNOWN_TOKEN; 7], &[11, 22, 3], 2), None);
        // A single way down needs no tokens; nor does a token that only one leaf has.
        assert_eq!(path(&TOKENS, &[UNKNOWN_TOKEN, 22, 3], 2), Some(vec![0, 4, 6]));
        let shape = Shape::new(&[-1, 0, 0, 2]).unwrap();
        assert_eq!(shape.accepting(&[1, 2, 3, 4], &[], 2).path(), Some(&[0, 2, 3][..]));
    }

    #[test]
    fn what_is_no_tree_is_refused() {
        for (parents, what) in [(&[-1, 1][..], "row 1 continues row 1"), (&[0, 0], "row 0"), (&[-1, -1], "row 1 continues row -1")] {
            assert!(Shape::new(parents).unwrap_err().contains(what));
        }
        let mut trees = Trees::default();
        let row = TreeRow { step_id: 8, rows: 7, parents: &PARENTS, tokens: &TOKENS, emitted: &[1], accepted: 3 };
        assert!(trees.add(3, row).unwrap_err().to_string().contains("step 8: parents: 3 drafts accepted of a tree of 2"));
        assert!(trees.add(3, TreeRow { rows: 8, ..row }).unwrap_err().to_string().contains("7 of them for 8 rows"));
        trees.add(3, TreeRow { accepted: 2, ..row }).unwrap();
        trees.add(4, TreeRow { rows: 3, parents: &[-1, 0, 1], ..row }).unwrap();
        trees.add(6, TreeRow { accepted: 0, ..row }).unwrap();
        assert_eq!((trees.len(), trees.get(2), trees.get(4), trees.get(7)), (2, None, None, None));
        assert_eq!((trees.get(6).unwrap().path(), trees.unknown_paths().collect::<Vec<_>>()), (Some(&[0][..]), vec![3]));
    }
}
