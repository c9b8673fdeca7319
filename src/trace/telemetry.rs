//! The machine's state during a recording: one sample every 200 ms from a thread of its own.

use super::TraceError;
use super::throttling::Throttling;
use super::writer::TelemetrySink;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_millis(200);

/// One row of `telemetry`. What the machine does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Default, serde::Deserialize)]
#[serde(default)]
pub struct TelemetrySample {
    /// When, ns since the Unix epoch.
    pub time_ns: i64,
    /// Clock of the device's multiprocessors, MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Clock of the device's memory, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Power drawn by the device, W.
    pub power_w: Option<f64>,
    /// Temperature of the device, or of the CPU where no device ran, °C.
    pub temperature_c: Option<f64>,
    /// Why the device ran slower than it could, in the driver's words, joined by commas; `none` when there was no reason.
    pub throttle_reasons: Option<String>,
    /// Device memory in use, bytes.
    pub memory_used_bytes: Option<u64>,
    /// Share of all CPU time that was busy since the sample before, 0...1.
    pub host_load: Option<f64>,
    /// Mean clock of the CPU cores, MHz.
    pub cpu_mhz: Option<f64>,
    /// Resident memory of the recording process, bytes.
    pub rss_bytes: Option<u64>,
}

/// Adds a device's state to a sample of the host. Called on the sampler's thread.
pub type DeviceSensor = Box<dyn FnMut(&mut TelemetrySample) + Send>;

/// A running sampler of the host, and of a device when it has a sensor. Dropping it ends it at once.
#[derive(Debug)]
pub struct HostSampler {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<Throttling>>,
}

impl HostSampler {
    /// Starts sampling into a writer; the first sample is taken at once.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(sink: TelemetrySink, interval: Duration, mut sensor: Option<DeviceSensor>) -> Result<Self, TraceError> {
        let (stop, stopped) = channel();
        let sample_until_stopped = move || {
            let mut host = Host::find();
            let mut throttling = Throttling::default();
            loop {
                let mut sample = host.sample();
                if let Some(sensor) = &mut sensor {
                    sensor(&mut sample);
                }
                throttling.add(&sample);
                // A full queue costs a sample, never the engine's time.
                sink.offer(sample);
                if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                    return throttling;
                }
            }
        };
        let thread = std::thread::Builder::new().name("telemetry".into()).spawn(sample_until_stopped);
        let thread = thread.map_err(|source| TraceError::Io { path: PathBuf::new(), action: "start the telemetry thread", source })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends it; gives what its samples say of throttling.
    pub fn finish(mut self) -> Throttling {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<Throttling> {
        self.stop = None;
        self.thread.take()?.join().ok()
    }
}

impl Drop for HostSampler {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where the host tells its state, and the CPU times of the sample before.
#[derive(Debug)]
struct Host {
    clocks: Vec<PathBuf>,
    temperature: Option<PathBuf>,
    before: Option<(u64, u64)>,
}

impl Host {
    fn find() -> Self {
        let clocks = entries("/sys/devices/system/cpu").into_iter().map(|cpu| cpu.join("cpufreq/scaling_cur_freq")).filter(|p| p.exists());
        let is_cpu = |zone: &PathBuf| {
            let kind = fs::read_to_string(zone.join("type")).unwrap_or_default().to_ascii_lowercase();
            ["x86_pkg_temp", "cpu", "soc", "k10temp"].iter().any(|word| kind.contains(word))
        };
        let temperature = entries("/sys/class/thermal").into_iter().find(is_cpu).map(|zone| zone.join("temp"));
        Self { clocks: clocks.collect(), temperature, before: cpu_times() }
    }

    fn sample(&mut self) -> TelemetrySample {
        let now = cpu_times();
        let host_load = match (self.before, now) {
            (Some((busy0, all0)), Some((busy1, all1))) if all1 > all0 => {
                Some((busy1.saturating_sub(busy0) as f64 / (all1 - all0) as f64).clamp(0.0, 1.0))
            }
            _ => None,
        };
        // Two samples within one tick of the counters say nothing: the next one spans both.
        if host_load.is_some() || self.before.is_none() {
            self.before = now;
        }
        TelemetrySample {
            time_ns: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)),
            temperature_c: self.temperature.as_deref().and_then(read_number).map(|milli| milli / 1000.0),
            host_load,
            cpu_mhz: self.cpu_mhz(),
            rss_bytes: rss_bytes(),
            ..TelemetrySample::default()
        }
    }

    fn cpu_mhz(&self) -> Option<f64> {
        let from_sys: Vec<f64> = self.clocks.iter().filter_map(|p| read_number(p)).map(|khz| khz / 1000.0).collect();
        if !from_sys.is_empty() {
            return mean(&from_sys);
        }
        let text = fs::read_to_string("/proc/cpuinfo").ok()?;
        let of_line = |line: &str| line.strip_prefix("cpu MHz")?.split_once(':')?.1.trim().parse().ok();
        mean(&text.lines().filter_map(of_line).collect::<Vec<f64>>())
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn entries(dir: &str) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(dir).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    paths
}

fn read_number(path: &Path) -> Option<f64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Busy and total CPU time since boot, in the kernel's ticks.
fn cpu_times() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().filter_map(|f| f.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal; guest times are within user and nice.
    let all: u64 = fields.iter().take(8).sum();
    let idle = fields.get(3)? + fields.get(4).copied().unwrap_or(0);
    Some((all.saturating_sub(idle), all))
}

fn rss_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_host_tells_its_memory_and_load() {
        let mut host = Host::find();
        let first = host.sample();
        assert!(first.rss_bytes.unwrap() > 100_000);
        assert!(first.time_ns > 1_600_000_000_000_000_000);
        assert!(first.sm_clock_mhz.is_none() && first.power_w.is_none());
        host.before = Some((0, 1));
        let load = host.sample().host_load.unwrap();
        assert!((0.0..=1.0).contains(&load), "{load}");
    }
}
