//! What a plan runs on: the two sides of the model, and what a trace says of them.

use super::nvml::Nvml;
use super::{Plan, RecordError};
use crate::engine::cuda::{
    CudaDspark, CudaDsparkDrafter, CudaMtp, CudaMtpDrafter, CudaSession, Device, DeviceWeights, MemoryPlan, TapPoint, check_cupti,
    is_of_cupti,
};
use crate::engine::drafter::{DraftKind, Drafter, NgramDrafter, NoDrafter};
use crate::engine::target::Target;
use crate::engine::{EngineError, Session};
use crate::trace::manifest::{DeviceInfo, GraphCounts, KERNELS_TIMED_BY_EVENTS, ProfilerFacts, Warning};
use crate::trace::{DeviceSensor, Manifest};
use std::rc::Rc;

/// What runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendKind {
    /// The CPU engine.
    #[default]
    Cpu,
    /// The CUDA engine on the first device.
    Cuda,
}

/// Whether kernels on a GPU are timed by CUPTI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CuptiUse {
    /// Never: by events.
    #[default]
    Never,
    /// Where it is there and may be used; else by events.
    IfThere,
    /// By nothing else.
    Always,
}

/// A plan's model, loaded and ready.
pub(super) struct Backend<'p> {
    pub target: Box<dyn Target + 'p>,
    pub drafter: Box<dyn Drafter + 'p>,
    /// The device, when it is not the CPU.
    device: Option<Rc<Device>>,
    /// What was planned of its memory, before anything was loaded.
    pub memory: Option<MemoryPlan>,
    /// Why CUPTI, which would have been used, is not.
    no_cupti: Option<String>,
}

/// The device, with CUPTI as it is wanted, and why it is not used.
pub(super) fn open_device(cupti: CuptiUse) -> Result<(Rc<Device>, Option<String>), EngineError> {
    match cupti {
        CuptiUse::Never => Ok((Device::open()?, None)),
        CuptiUse::Always => Ok((Device::open_profiled()?, None)),
        CuptiUse::IfThere => match Device::open_profiled() {
            Err(error) if is_of_cupti(&error) => Ok((Device::open()?, Some(error.to_string()))),
            opened => Ok((opened?, None)),
        },
    }
}

/// Whether there is the CUPTI that a plan insists on; it is not opened.
///
/// # Errors
/// When there is none, or not one that could be used.
pub(super) fn check_profiler(plan: &Plan<'_>) -> Result<(), EngineError> {
    let needed = plan.options.backend == BackendKind::Cuda && plan.options.cupti == CuptiUse::Always;
    if needed { check_cupti() } else { Ok(()) }
}

impl<'p> Backend<'p> {
    /// Loads the plan's model; with `kernels` it can time them.
    ///
    /// # Errors
    /// When the model has no block to draft with, or there is no device that can take it.
    pub fn open(plan: &Plan<'p>, kernels: bool) -> Result<Self, RecordError> {
        let checkpoint = plan.checkpoint;
        let (config, weights, draft) = (&checkpoint.config, &checkpoint.weights, plan.options.draft);
        let no_mtp = || RecordError::NoMtp { model: checkpoint.name.clone() };
        if plan.options.backend == BackendKind::Cpu {
            let drafter = plan.build_drafter()?;
            let mut session = Session::new(config, weights);
            session.route_by(plan.routing_plan()?);
            return Ok(Self { target: Box::new(session), drafter, device: None, memory: None, no_cupti: None });
        }
        let cupti = if kernels { plan.options.cupti } else { CuptiUse::Never };
        let (device, no_cupti) = open_device(cupti)?;
        let drafted = matches!(draft, DraftKind::Mtp | DraftKind::Dspark);
        let tokens = longest(plan);
        let sampling = plan.options.sampling;
        let mut memory = MemoryPlan::new(config, weights, tokens, draft == DraftKind::Mtp)?.choosing(config, sampling, drafted);
        if let Some(drafter) = plan.drafter {
            memory = memory.with_drafter(drafter)?;
        }
        memory.check(device.free_bytes()?)?;
        let loaded = Rc::new(DeviceWeights::upload(&device, config, weights)?);
        let taps: Vec<TapPoint> = plan.drafter.iter().flat_map(|d| &d.config.taps).map(|layer| TapPoint::Layer(*layer)).collect();
        let mut target = CudaSession::new(&device, config, &loaded, tokens, &taps)?.choosing(sampling, drafted)?;
        target.route_by(plan.routing_plan()?);
        let drafter: Box<dyn Drafter> = match draft {
            DraftKind::Mtp => {
                let module = CudaMtp::new(&device, config, &loaded, tokens)?.ok_or_else(no_mtp)?;
                Box::new(CudaMtpDrafter::new(module, &target, sampling)?)
            }
            DraftKind::Dspark => {
                let checkpoint = plan.drafter.ok_or_else(no_mtp)?;
                let module = CudaDspark::new(&device, checkpoint, &loaded, tokens)?;
                Box::new(CudaDsparkDrafter::new(module, &target, sampling, plan.options.min_survival)?)
            }
            DraftKind::Ngram => Box::new(NgramDrafter),
            DraftKind::None => Box::new(NoDrafter),
        };
        Ok(Self { target: Box::new(target), drafter, device: Some(device), memory: Some(memory), no_cupti })
    }

    /// What can be asked of the device when the run is over.
    pub fn witness(&self) -> Witness {
        Witness { device: self.device.clone() }
    }

    /// Writes into a manifest what ran it; `timed`: kernels are timed.
    pub fn describe(&self, manifest: &mut Manifest, timed: bool) {
        let Some(device) = &self.device else { return };
        manifest.engine = format!("specprof-cuda {}", env!("CARGO_PKG_VERSION"));
        manifest.device = DeviceInfo { kind: "cuda".to_owned(), name: device.name().to_owned(), units: device.units() };
        manifest.emulated = device.is_emulated();
        let cupti = device.cupti().filter(|_| timed);
        if let Some(flaw) = cupti.as_ref().and_then(|facts| facts.flaw) {
            manifest.warnings.push(Warning::new("cupti_13_0", flaw));
        }
        if timed && cupti.is_none() {
            let why = self.no_cupti.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
            let text = format!(
                "kernels were timed by an event after each launch{why}: the gap before a kernel counts with it, and steps take longer than \
                 untimed ones, which run as graphs"
            );
            manifest.warnings.push(Warning::new(KERNELS_TIMED_BY_EVENTS, text));
        }
    }

    /// What reads the device's clocks, power, temperature and throttling; `None` on the CPU, and where the driver does not tell
    /// them, which the manifest then says.
    pub fn sensor(&self, manifest: &mut Manifest) -> Option<DeviceSensor> {
        let device = self.device.as_ref()?;
        match Nvml::open(device.uuid()) {
            Ok(nvml) => Some(Box::new(move |sample| nvml.fill(sample))),
            Err(reason) => {
                let text = format!("{reason}: the device's clocks, power and temperature are unknown, and whether it was throttled");
                manifest.warnings.push(Warning::new("no_device_telemetry", text));
                None
            }
        }
    }
}

/// What a run's device says afterwards.
pub(super) struct Witness {
    device: Option<Rc<Device>>,
}

impl Witness {
    /// Writes into a manifest what only the run has shown. `kernel_every`: of so many steps the kernels of one were timed.
    pub fn describe(&self, manifest: &mut Manifest, kernel_every: u32) {
        let Some(device) = &self.device else { return };
        if let Some(facts) = device.cupti() {
            manifest.instrumentation.profiler = Some(ProfilerFacts {
                name: "cupti".to_owned(),
                version: facts.version,
                kernel_every,
                steps: facts.steps,
                launched: facts.launched,
                timeless: facts.timeless,
                missing: facts.missing,
                clock_shift_ns: facts.clock_shift_ns,
                clock_error_ns: facts.clock_error_ns,
                clock_drift_ns: Some(facts.clock_drift_ns),
            });
            let lost = facts.timeless + facts.missing;
            if lost > 0 || facts.dropped > 0 {
                let text = format!(
                    "of {} kernels and copies {lost} are not in the trace: CUPTI gave no times of {} and no record of {} (it says that it dropped {}); \
                     times by component are too small by theirs",
                    facts.launched, facts.timeless, facts.missing, facts.dropped
                );
                manifest.warnings.push(Warning::new("cupti_records_lost", text));
            }
        }
        let graphs = device.graph_use();
        if graphs.launches > 0 {
            manifest.instrumentation.graphs = Some(GraphCounts { captured: graphs.captured, launches: graphs.launches });
        }
        if let Some(reason) = graphs.refused {
            let text = format!("passes were launched kernel by kernel, for the driver refused to capture a graph: {reason}");
            manifest.warnings.push(Warning::new("cuda_graphs_refused", text));
        }
    }
}

/// Tokens of the longest timeline that the plan can make: prompt, output and a window that runs over its end.
fn longest(plan: &Plan<'_>) -> usize {
    let window = plan.options.draft_len + 2;
    let request = |r: &super::PlannedRequest| r.tokens.len() + r.max_new_tokens as usize + window;
    plan.requests.iter().map(request).max().unwrap_or(window).min(plan.checkpoint.config.max_position)
}

/// The one line of a machine without a device that the CUDA engine can use; `None` when there is one.
pub fn why_no_cuda() -> Option<String> {
    cuda_device().err()
}

/// What the CUDA engine finds out about its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaDevice {
    /// The driver's name for it.
    pub name: String,
    /// The architecture whose kernels are loaded.
    pub image: &'static str,
    /// Whether it is the tests' stand-in.
    pub emulated: bool,
    /// Its identity, `GPU-...`, when the driver says.
    pub uuid: Option<String>,
    /// Bytes of memory, free and all, when the driver says.
    pub memory: Option<(u64, u64)>,
}

/// Opens the device that the CUDA engine would take, kernels and all, and closes it again. A driver that hangs hangs this.
///
/// # Errors
/// One line that says why there is none.
pub fn cuda_device() -> Result<CudaDevice, String> {
    let device = Device::open().map_err(|error| match error {
        EngineError::Device(reason) => reason,
        other => other.to_string(),
    })?;
    Ok(CudaDevice {
        name: device.name().to_owned(),
        image: device.image(),
        emulated: device.is_emulated(),
        uuid: device.uuid().map(str::to_owned),
        memory: device.memory_bytes().ok().map(|(free, all)| (free as u64, all as u64)),
    })
}
