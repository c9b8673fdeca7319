//! How little is too little and how far apart is too far: the same bounds wherever they are asked.

/// Below this number of requests a bootstrap over requests gives intervals that are too narrow.
pub const FEW_REQUESTS: u64 = 10;
/// Below this number of decode steps a single disturbed one decides their mean: no verdict rests on fewer.
pub const FEW_DECODE_STEPS: u64 = 10;
/// Below this number of verify steps a recording is not ranked among others: the same of the other side of the ratio.
pub const FEW_VERIFY_STEPS: u64 = 10;
/// Times of steps are noisy when their mean and their median are further apart than this factor, on whichever side.
pub const NOISY_MEAN: f64 = 1.5;
/// They are noisy, too, when one step's time beyond the median is more than this share of the time of all: it alone moves the mean by that much.
/// Asked only of at least [`FEW_DECODE_STEPS`] steps; of fewer, any of them is a large share.
pub const NOISY_STEP_SHARE: f64 = 0.1;
/// A fit that explains less than this share of the times' variance says nothing of what an expert costs, however narrow its interval.
pub const MIN_EXPLAINED: f64 = 0.1;
/// A calibrated time is noisy when its 95 % interval is wider than the time itself, ±50 %.
pub const NOISY_INTERVAL: f64 = 1.0;

/// Code of the warning that a mean time of steps rests on a few of them.
pub const NOISY_TIMES: &str = "noisy_times";
/// Code of the warning that fewer than [`FEW_REQUESTS`] requests stand behind intervals.
pub const FEW_REQUESTS_CODE: &str = "few_requests";
