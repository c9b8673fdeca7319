//! One CUDA device with the kernels loaded, its stream, and its memory. With `buffer`, `launch`, `timer`, `spans`, `graph`,
//! `pinned` and `symbols` the only file that calls the driver.

pub(super) use super::buffer::{Buffer, Plain};
use super::cupti::{CuptiFacts, Profiler};
use super::graph::GraphUse;
use super::moved::{KernelBytes, Ledger, Moved};
use super::spans::Spans;
use super::timer::{Launched, Timer};
use super::{images, symbols};
use crate::engine::clock::Clock;
use crate::engine::{EngineError, ForwardTap};
use crate::trace::{Component, KernelEvent, Module, quiet};
use cudarc::driver::{DriverError, result, sys};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::mem::size_of_val;
use std::rc::Rc;

/// The name of the device that the tests' driver shows.
const EMULATOR: &str = "specprof emulator";

/// A device with a context and the kernels' image. One thread uses it.
#[derive(Debug)]
pub struct Device {
    ordinal: sys::CUdevice,
    module: sys::CUmodule,
    functions: RefCell<HashMap<&'static str, Function>>,
    /// Where all kernels run. It waits for work without a stream and that for it; work without one cannot be captured.
    pub(super) stream: sys::CUstream,
    pub(super) graphs: RefCell<GraphUse>,
    /// Whether launches become nodes of a graph just now.
    pub(super) capturing: Cell<bool>,
    profiler: RefCell<Option<Profiler>>,
    ledger: RefCell<Ledger>,
    /// Times of the launches of the passes that have not been finished.
    pub(super) timer: RefCell<Timer>,
    /// Times of the passes of the step.
    spans: RefCell<Spans>,
    /// Whether everything in the stream has been waited for.
    waited: Cell<bool>,
    name: String,
    uuid: Option<String>,
    units: Option<u32>,
    image: &'static str,
}

/// A kernel of the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Registers a thread; `None` when the driver does not say.
    pub registers: Option<u32>,
    /// Static shared memory of a block, bytes.
    pub shared_bytes: u32,
}

/// The error of a driver's call.
pub(super) fn failed(what: &str, error: DriverError) -> EngineError {
    let name = error.error_name().map_or_else(|_| "an unknown error".to_owned(), |n| n.to_string_lossy().into_owned());
    EngineError::Device(format!("CUDA: {what}: {name}"))
}

/// The oldest CUDA version whose drivers take the kernels' images, as the driver counts: 1000 major + 10 minor.
const OLDEST_DRIVER: i32 = 12_000;

/// The newest CUDA version that the driver knows.
fn driver_version() -> Result<i32, EngineError> {
    let mut version = 0;
    // SAFETY: room for one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|e| failed("the driver does not say its version", e))?;
    Ok(version)
}

fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// 16 bytes as `GPU-00010203-0405-0607-0809-0a0b0c0d0e0f`.
fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (i, byte) in bytes.into_iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

impl Device {
    /// Opens the first device and loads the kernels for it.
    ///
    /// # Errors
    /// [`EngineError::Device`] when there is no driver, no device, or none that the kernels run on.
    pub fn open() -> Result<Rc<Self>, EngineError> {
        Self::open_or_refuse(false)
    }

    /// [`Device::open`], with kernels timed by CUPTI.
    ///
    /// # Errors
    /// Also when CUPTI is not there or may not be used; see [`is_of_cupti`](super::is_of_cupti).
    pub fn open_profiled() -> Result<Rc<Self>, EngineError> {
        Self::open_or_refuse(true)
    }

    fn open_or_refuse(profiled: bool) -> Result<Rc<Self>, EngineError> {
        // A function that the driver lacks, or a name without an end, makes the binding panic.
        quiet::catch(|| Self::open_first(profiled)).unwrap_or_else(|| {
            let text = "CUDA: libcuda.so.1 lacks a function of the driver of CUDA 12, or answers as none does: update the driver, or \
                        look at what LD_LIBRARY_PATH finds";
            Err(EngineError::Device(text.to_owned()))
        })
    }

    fn open_first(profiled: bool) -> Result<Rc<Self>, EngineError> {
        // SAFETY: loads the driver's library, whose initialisers are as safe as any library's.
        if !unsafe { sys::is_culib_present() } {
            let text = "CUDA: libcuda.so.1 cannot be loaded: no NVIDIA driver is installed, or it is not in LD_LIBRARY_PATH";
            return Err(EngineError::Device(text.to_owned()));
        }
        symbols::check()?;
        let profiler = if profiled { Some(Profiler::open()?) } else { None };
        result::init().map_err(|e| failed("the driver does not start", e))?;
        let version = driver_version()?;
        if version < OLDEST_DRIVER {
            let text = format!(
                "CUDA: the driver is too old: it knows CUDA {}, the kernels need {} (driver 525) or later",
                cuda_version(version),
                cuda_version(OLDEST_DRIVER)
            );
            return Err(EngineError::Device(text));
        }
        let devices = result::device::get_count().map_err(|e| failed("devices cannot be counted", e))?;
        if devices < 1 {
            return Err(EngineError::Device("CUDA: the driver has no device".to_owned()));
        }
        let ordinal = result::device::get(0).map_err(|e| failed("there is no device", e))?;
        let attribute = |which| {
            // SAFETY: `ordinal` is a device that the driver gave.
            unsafe { result::device::get_attribute(ordinal, which) }.map_err(|e| failed("the device does not say what it is", e))
        };
        let name = result::device::get_name(ordinal).map_err(|e| failed("the device does not say its name", e))?;
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let units = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let Some((image, packed)) = images::packed(major, minor) else {
            let text = format!("CUDA: {name} has compute capability {major}.{minor}; the kernels need 8.0 or later");
            return Err(EngineError::Device(text));
        };
        let bytes = images::unpack(image, packed)?;
        // SAFETY: the device exists; the context is current on this thread from here on, and `Device` is not `Send`.
        unsafe {
            let context = result::primary_ctx::retain(ordinal).map_err(|e| failed("no context", e))?;
            result::ctx::set_current(context).map_err(|e| failed("no context", e))?;
        }
        let stream = result::stream::create(result::stream::StreamKind::Default).map_err(|e| failed("no stream", e))?;
        // SAFETY: a whole image that ends with a zero byte.
        let loaded = unsafe { result::module::load_data(bytes.as_ptr().cast()) };
        let module =
            loaded.map_err(|e| failed(&format!("the kernels for {image} do not load on {name}; a newer driver may be needed"), e))?;
        Ok(Rc::new(Self {
            ordinal,
            module,
            functions: RefCell::default(),
            stream,
            graphs: RefCell::default(),
            capturing: Cell::new(false),
            profiler: RefCell::new(profiler),
            ledger: RefCell::default(),
            timer: RefCell::new(Timer::new(stream)),
            spans: RefCell::new(Spans::new(stream)),
            waited: Cell::new(true),
            name,
            uuid: result::device::get_uuid(ordinal).ok().map(|uuid| uuid_text(uuid.bytes.map(|b| b as u8))),
            units: u32::try_from(units).ok(),
            image,
        }))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's identity as NVML and `nvidia-smi` write it, `GPU-...`; `None` when the driver does not say.
    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }

    /// Multiprocessors.
    pub fn units(&self) -> Option<u32> {
        self.units
    }

    /// The architecture whose kernels are loaded.
    pub fn image(&self) -> &'static str {
        self.image
    }

    /// Whether it is the tests' emulator, whose times mean nothing.
    pub fn is_emulated(&self) -> bool {
        self.name == EMULATOR
    }

    /// Bytes of memory that are free, and of all.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn memory_bytes(&self) -> Result<(usize, usize), EngineError> {
        result::mem_get_info().map_err(|e| failed("the device does not say what memory is free", e))
    }

    /// Bytes of memory that are free.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn free_bytes(&self) -> Result<usize, EngineError> {
        Ok(self.memory_bytes()?.0)
    }

    /// Waits for all work of the stream.
    pub(super) fn wait(&self) -> Result<(), EngineError> {
        // SAFETY: the stream lives as long as the device.
        let waited = unsafe { result::stream::synchronize(self.stream) };
        waited.map_err(|e| failed("waiting for a pass (a kernel may have failed)", e))?;
        self.waited.set(true);
        Ok(())
    }

    /// Whether passes are to run as graphs: not where events between their kernels time them, nor after a refusal.
    pub(super) fn takes_graphs(&self) -> bool {
        !self.timer.borrow().is_on() && self.graphs.borrow().refused.is_none()
    }

    /// What became of graphs so far.
    pub fn graph_use(&self) -> GraphUse {
        self.graphs.borrow().clone()
    }

    /// Begins a pass or a commit of a module, timed when there is a clock.
    pub(super) fn start(&self, module: Module, clock: Option<Clock>) -> Result<(), EngineError> {
        self.waited.set(false);
        self.spans.borrow_mut().begin()?;
        self.ledger.borrow_mut().clear();
        let mut profiler = self.profiler.borrow_mut();
        let Some(profiler) = &mut *profiler else { return self.timer.borrow_mut().start(module, clock) };
        self.timer.borrow_mut().start(module, None)?;
        profiler.record(clock)
    }

    /// Everything of what was [started](Self::start) last has been put into the stream.
    pub(super) fn end(&self) -> Result<(), EngineError> {
        self.spans.borrow_mut().end()
    }

    /// What the next launches work for.
    pub(super) fn label(&self, layer: Option<usize>, component: Component) {
        self.timer.borrow_mut().label(layer, component);
    }

    /// Whose launches the next ones are, where no pass of it [starts](Self::start).
    pub(super) fn of_module(&self, module: Module) {
        self.timer.borrow_mut().of_module(module);
    }

    /// Keeps rows of the target for a drafter, behind the step's last wait: copies `bytes` bytes as [`Device::copy`] does.
    pub(super) fn keep_rows(&self, from: u64, to: u64, bytes: usize) -> Result<(), EngineError> {
        self.of_module(Module::Draft);
        self.label(None, Component::Commit);
        self.spans.borrow_mut().begin()?;
        self.copy(from, to, bytes)?;
        let mut spans = self.spans.borrow_mut();
        spans.is_late();
        spans.end()
    }

    /// Lets the stream copy `bytes` bytes between places of device memory, which must be inside buffers and apart.
    pub(super) fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), EngineError> {
        self.launch(Launched::copy("memcpy DtoD"), || {
            // SAFETY: the caller has checked both ranges; buffers are freed when the stream has done its work only.
            let copied = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) };
            copied.map_err(|e| failed("a copy on the device", e))
        })
    }

    /// Takes down what the next launch has to move.
    pub(super) fn note(&self, kernel: &'static str, moved: Option<Moved>) {
        let component = self.timer.borrow().shown();
        self.ledger.borrow_mut().add(component, kernel, moved);
    }

    /// What was launched one by one, or captured, since the last pass began; a graph that is launched again is not among it.
    pub fn launched_kernels(&self) -> Vec<KernelBytes> {
        self.ledger.borrow().kernels()
    }

    /// Does `launch`, which launches one kernel or copy.
    pub(super) fn launch(&self, launched: Launched, launch: impl FnOnce() -> Result<(), EngineError>) -> Result<(), EngineError> {
        let mut profiler = self.profiler.borrow_mut();
        let Some(profiler) = &mut *profiler else {
            launch()?;
            return self.timer.borrow_mut().launched(launched);
        };
        let tagged = self.timer.borrow().tag(launched);
        if self.capturing.get() {
            launch()?;
            return profiler.captured(tagged);
        }
        profiler.before()?;
        launch()?;
        profiler.launched(tagged)
    }

    /// Does `launch`, which launches a graph of `nodes` kernels and copies.
    pub(super) fn launch_graph(&self, nodes: u64, launch: impl FnOnce() -> Result<(), EngineError>) -> Result<(), EngineError> {
        let mut profiler = self.profiler.borrow_mut();
        let Some(profiler) = &mut *profiler else { return launch() };
        profiler.before()?;
        launch()?;
        profiler.launched_graph(nodes)
    }

    /// Kernels and copies captured so far.
    pub(super) fn captured_nodes(&self) -> u64 {
        self.profiler.borrow().as_ref().map_or(0, Profiler::nodes)
    }

    /// Ends a step: tells a tap the device's time of it, and of the kernels that CUPTI has recorded. Waits for what has not been waited for.
    pub(super) fn settle(&self, tap: &mut dyn ForwardTap) -> Result<(), EngineError> {
        let profiled = self.profiler.borrow().as_ref().is_some_and(Profiler::has_records);
        self.taken()?.into_iter().for_each(|kernel| tap.kernel(kernel));
        // An emulated device's time is measured like any other and told to nobody.
        if let Some(ns) = self.spans.borrow_mut().take(self.waited.get() && !profiled)?.filter(|_| !self.is_emulated()) {
            tap.device_time(ns);
        }
        Ok(())
    }

    /// Forgets the passes since the step before: what has no steps has no times.
    pub(super) fn forget_times(&self) {
        self.spans.borrow_mut().forget();
    }

    /// The kernels that CUPTI has recorded since the step began; waits for them.
    pub(super) fn taken(&self) -> Result<Vec<KernelEvent>, EngineError> {
        let mut profiler = self.profiler.borrow_mut();
        let Some(profiler) = profiler.as_mut().filter(|p| p.has_records()) else { return Ok(Vec::new()) };
        self.wait()?;
        profiler.take()
    }

    /// What CUPTI has recorded so far; `None` where it times nothing.
    pub fn cupti(&self) -> Option<CuptiFacts> {
        self.profiler.borrow().as_ref().map(Profiler::facts)
    }

    /// A kernel by name.
    pub(super) fn function(&self, name: &'static str) -> Result<Function, EngineError> {
        if let Some(function) = self.functions.borrow().get(name) {
            return Ok(*function);
        }
        let symbol = CString::new(name).map_err(|e| EngineError::Device(format!("CUDA: kernel {name}: {e}")))?;
        // SAFETY: the module is loaded as long as the device is.
        let found = unsafe { result::module::get_function(self.module, symbol) };
        let handle = found.map_err(|e| failed(&format!("the image has no kernel {name}"), e))?;
        let attribute = |which| {
            // SAFETY: the function was found above.
            unsafe { result::function::get_function_attribute(handle, which) }.ok().and_then(|n| u32::try_from(n).ok())
        };
        // No kernel needs no registers: the emulator does not know them.
        let registers = attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).filter(|n| *n > 0);
        let shared_bytes = attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES).unwrap_or_default();
        let function = Function { handle, registers, shared_bytes };
        self.functions.borrow_mut().insert(name, function);
        Ok(function)
    }

    /// Memory of `bytes` bytes, whose contents are undefined.
    pub(super) fn room(self: &Rc<Self>, bytes: usize) -> Result<Buffer, EngineError> {
        Buffer::room(self, bytes)
    }

    /// Memory of `bytes` bytes, all 0.
    pub(super) fn zeros(self: &Rc<Self>, bytes: usize) -> Result<Buffer, EngineError> {
        let buffer = self.room(bytes)?;
        buffer.clear()?;
        Ok(buffer)
    }

    /// A copy of `values`.
    pub(super) fn upload<T: Plain>(self: &Rc<Self>, values: &[T]) -> Result<Buffer, EngineError> {
        let buffer = self.room(size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Both belong to the context.
        *self.profiler.borrow_mut() = None;
        *self.timer.borrow_mut() = Timer::new(self.stream);
        self.spans.borrow_mut().forget();
        // SAFETY: every buffer holds the device, so none is left; what fails here is gone with the process.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::module::unload(self.module);
            let _ = result::primary_ctx::release(self.ordinal);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn identities_and_versions_are_written_as_the_driver_writes_them() {
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(super::uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!((super::cuda_version(12_080), super::cuda_version(11_040)), ("12.8".to_owned(), "11.4".to_owned()));
    }
}
