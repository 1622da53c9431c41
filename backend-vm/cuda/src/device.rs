//! [`CudaDevice`].

mod driver_calls;
mod kernels;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::atomic::AtomicU64;

use wormhole_api::constants::device_attribute::{
    COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR,
};
use wormhole_api::constants::function_attribute::MAX as FUNCTION_ATTRIBUTES_END;
use wormhole_api::constants::host_register_flags;
use wormhole_api::constants::jit_input;
use wormhole_api::ctypes::{CUcontext, CUevent, CUfunction, CUlaunchConfig, CUlinkState, CUstream};
use wormhole_device::{
    CuError, Description, Device, DeviceOutput, DriverCalls as _, Fill, ImageKind, ImageOutput,
    Jit, Launch, LinkInput, LoadedFunction, LoadedModule, Loading, ManagedPlace, Parameter,
    RawEvent, RawFunction, RawModule, RawStream, Result,
};
use wormhole_lock::Mutex;

use wormhole_fatbin::host::{self, Content, HostError};
use wormhole_fatbin::is_fatbin;

use self::kernels::configuration;
use crate::code::{Alternative, Attempts, Budget, Code, alternatives};
use crate::current::Identity;
use crate::driver::Driver;
use crate::graph::Executable;
use crate::graph::{extra, parameter_list};
use crate::images::{Images, Loaded};
use crate::launch_events::WithEvents;
use crate::library::{self, LibraryError};
use crate::managed;
use crate::open::{self, Handles, OpenError, Opened, Options};
use crate::printing::Printing;
use crate::{capture, current, jit, shared_events};

const REGISTER_FLAGS: u32 = host_register_flags::PORTABLE | host_register_flags::DEVICEMAP;

/// Device of the real driver.
#[derive(Debug)]
pub struct CudaDevice {
    driver: Driver,
    device: i32,
    /// None while the context is reset, and once a reset has failed.
    context: Mutex<Option<Handles>>,
    identity: Identity,
    description: Description,
    images: Mutex<Images>,
    budget: Budget,
    /// `CUDA_FORCE_PTX_JIT`: ignores machine code in fat binaries (CUDA programming guide, "CUDA Environment
    /// Variables").
    forces_ptx: bool,
    /// `CUDA_MODULE_LOADING`: loads libraries at the call.
    loads_eagerly: bool,
    /// Executable graphs by number. Numbers are never reused.
    pub(crate) graphs: Mutex<HashMap<u64, Executable>>,
    pub(crate) next_graph: AtomicU64,
    /// Kernel of the context that compares memory, once loaded.
    pub(crate) comparing: Mutex<Option<RawFunction>>,
}

/// Converts a number to a handle of the driver.
pub(crate) fn pointer<T>(raw: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(size(raw))
}

pub(crate) fn stream(stream: RawStream) -> CUstream {
    pointer(stream.0)
}

pub(crate) fn event(event: RawEvent) -> CUevent {
    pointer(shared_events::place_of(event).0)
}

pub(crate) fn function(function: RawFunction) -> CUfunction {
    pointer(function.0)
}

pub(crate) fn handle<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

/// Converts a size or an address; this machine has 64 bits.
pub(crate) fn size(value: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Returns whether an error of a query means that the context is dead. Other errors: the query was wrong (invalid
/// handles, no context, capture) or early.
fn is_sticky(error: CuError) -> bool {
    let of_captures = CuError::STREAM_CAPTURE_UNSUPPORTED.0..=CuError::TIMEOUT.0;
    let early_or_wrong = matches!(
        error,
        CuError::INVALID_VALUE
            | CuError::NOT_INITIALIZED
            | CuError::INVALID_CONTEXT
            | CuError::INVALID_HANDLE
            | CuError::NOT_READY
    );
    !early_or_wrong && !of_captures.contains(&error.0)
}

impl CudaDevice {
    /// Returns the driver, with this device's context current in the calling thread.
    #[inline]
    pub(crate) fn driver(&self) -> &Driver {
        self.identity.enter(&self.driver, || self.handle());
        &self.driver
    }

    /// Returns the driver's ordinal of the device.
    pub(crate) fn ordinal(&self) -> i32 {
        self.device
    }

    /// Adds the inputs to a new link, and calls `then` with it.
    fn with_link<R>(
        &self,
        inputs: &[LinkInput<'_>],
        jit: &mut Jit,
        then: impl FnOnce(CUlinkState) -> Result<R>,
    ) -> Result<R> {
        let mut options = jit::Options::new(jit);
        let (count, keys, values) = (options.count(), options.keys(), options.values());
        let mut state = ptr::null_mut();
        // SAFETY: the options outlive the link, and the place for the state is writable.
        unsafe {
            self.driver()
                .cuLinkCreate_v2(count, keys, values, &raw mut state)
        }?;
        let mut refusal = String::new();
        let linked = self
            .add_inputs(state, inputs, &mut refusal)
            .and_then(|()| then(state));
        // SAFETY: the state is live, and `then` has copied its image.
        let destroyed = unsafe { self.driver().cuLinkDestroy(state) };
        options.finish(jit);
        if !refusal.is_empty() && jit.log_bytes > 0 {
            jit.errors = refusal.into_bytes();
        }
        let linked = linked?;
        destroyed.map(|()| linked)
    }

    /// Adds the inputs. Sets `refusal` to the linker's message if this device refuses an input itself.
    fn add_inputs(
        &self,
        state: CUlinkState,
        inputs: &[LinkInput<'_>],
        refusal: &mut String,
    ) -> Result<()> {
        let mut attempts = Attempts::default();
        for input in inputs {
            // Text of the driver (measured on driver 580).
            let mut unreadable = |_: HostError| {
                *refusal = format!("fatal   : Could not find fatbin in '{}'", input.name);
                CuError::UNKNOWN
            };
            let name = CString::new(input.name).map_err(|_| CuError::INVALID_VALUE)?;
            let data = Cow::Borrowed(input.data);
            match input.kind {
                jit_input::CUBIN => self.add(state, &name, &Code::machine(data)?)?,
                jit_input::PTX => self.add(state, &name, &Code::new(data)?)?,
                jit_input::FATBINARY if is_fatbin(input.data) => {
                    self.add_fatbin(state, &name, &mut attempts, input.data)?;
                }
                jit_input::FATBINARY => self.add(state, &name, &Code::machine(data)?)?,
                jit_input::OBJECT => match host::of_object(input.data).map_err(&mut unreadable)? {
                    Content::Cubin(cubin) => {
                        self.add(state, &name, &Code::new(Cow::Borrowed(cubin))?)?;
                    }
                    Content::Fatbins(fatbins) => {
                        for fatbin in fatbins {
                            self.add_fatbin(state, &name, &mut attempts, fatbin)?;
                        }
                    }
                },
                jit_input::LIBRARY => {
                    let checked = library::check(&self.budget, &mut attempts, input.data);
                    checked.map_err(|error| match error {
                        LibraryError::Unreadable(error) => unreadable(error),
                        LibraryError::Code(error) => error,
                    })?;
                    self.add_data(state, &name, jit_input::LIBRARY, input.data)?;
                }
                // `CU_JIT_INPUT_NVVM`: a driver of CUDA 13 has no compiler for it (measured).
                _ => return Err(CuError::JIT_COMPILER_NOT_FOUND),
            }
        }
        Ok(())
    }

    /// Adds the best code of a fat binary.
    fn add_fatbin(
        &self,
        state: CUlinkState,
        name: &CStr,
        attempts: &mut Attempts,
        fatbin: &[u8],
    ) -> Result<()> {
        let best = alternatives(fatbin, self.arch(), self.forces_ptx)?;
        // A fat binary without code for the device adds nothing (measured).
        let Some(best) = best.first() else {
            return Ok(());
        };
        attempts.begin(best)?;
        match best {
            Alternative::Entry(entry) => self.add(state, name, &self.budget.unpack(entry)?),
            Alternative::Linked(entries) => entries
                .iter()
                .try_for_each(|entry| self.add(state, name, &self.budget.unpack(entry)?)),
            Alternative::Plain(_) => Err(CuError::INVALID_IMAGE),
        }
    }

    fn add(&self, state: CUlinkState, name: &CStr, code: &Code<'_>) -> Result<()> {
        self.add_data(state, name, code.link_kind(), code.bytes())
    }

    fn add_data(&self, state: CUlinkState, name: &CStr, kind: u32, data: &[u8]) -> Result<()> {
        let (options, values) = (ptr::null_mut(), ptr::null_mut());
        let start = data.as_ptr().cast_mut().cast();
        // SAFETY: the driver reads that many bytes, the last of a text being zero, and keeps no pointer.
        unsafe {
            self.driver().cuLinkAddData_v2(
                state,
                kind,
                start,
                data.len(),
                name.as_ptr(),
                0,
                options,
                values,
            )
        }
    }

    /// Completes a link and copies its image.
    fn complete(&self, state: CUlinkState) -> Result<Vec<u8>> {
        let (mut image, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: both places are writable.
        unsafe {
            self.driver()
                .cuLinkComplete(state, &raw mut image, &raw mut bytes)
        }?;
        // SAFETY: the driver keeps the image until the link is destroyed.
        Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), bytes) }.to_vec())
    }

    /// Initialises the driver and the device's primary context, which becomes current in the calling thread.
    pub fn open(options: &Options) -> std::result::Result<Self, OpenError> {
        let Opened {
            driver,
            device,
            handles,
            description,
        } = open::open(options)?;
        Ok(Self {
            driver,
            device,
            context: Mutex::new(Some(handles)),
            identity: Identity::of_current(),
            description,
            images: Mutex::default(),
            budget: Budget::default(),
            forces_ptx: variable_is("CUDA_FORCE_PTX_JIT", "1"),
            loads_eagerly: variable_is("CUDA_MODULE_LOADING", "EAGER"),
            graphs: Mutex::default(),
            next_graph: AtomicU64::new(1),
            comparing: Mutex::new(None),
        })
    }

    /// Returns the driver's handle of the context. Returns that of no context once a reset has failed.
    pub(crate) fn handle(&self) -> CUcontext {
        let handles = *self.context.lock();
        handles.map_or(ptr::null_mut(), |handles| handles.context)
    }

    /// Resets the context and retains the new one. The calling thread's current context is unknown after a failure.
    fn renewed(&self) -> Result<Handles> {
        // SAFETY: the device exists; the caller uses no object that the reset destroys afterwards. The reset keeps the
        // retained reference and `retain` adds one, so one is released.
        unsafe {
            self.driver.cuDevicePrimaryCtxReset_v2(self.device)?;
            let again = open::retain(&self.driver, self.device)?;
            self.driver.cuDevicePrimaryCtxRelease_v2(self.device)?;
            Ok(again)
        }
    }

    /// Returns the compute capability, 90 for 9.0; 0 if the driver does not report it.
    fn arch(&self) -> u32 {
        let attribute = |id| {
            let found = self
                .description
                .attributes
                .iter()
                .find(|(known, _)| *known == id);
            found
                .and_then(|(_, value)| u32::try_from(*value).ok())
                .unwrap_or(0)
        };
        attribute(COMPUTE_CAPABILITY_MAJOR) * 10 + attribute(COMPUTE_CAPABILITY_MINOR)
    }

    pub(crate) fn image(&self, module: RawModule) -> Result<Loaded> {
        self.images.lock().get(module)
    }

    /// Extracts the code of one way to load an image.
    fn code<'a>(&'a self, way: &Alternative<'a>, jit: &mut Jit) -> Result<Code<'a>> {
        match way {
            Alternative::Plain(image) => Code::new(Cow::Borrowed(image)),
            Alternative::Entry(entry) => self.budget.unpack(entry),
            Alternative::Linked(entries) => {
                let codes = entries
                    .iter()
                    .map(|entry| self.budget.unpack(entry))
                    .collect::<Result<Vec<_>>>()?;
                let inputs: Vec<_> = codes
                    .iter()
                    .map(|code| LinkInput {
                        kind: code.link_kind(),
                        name: "relocatable device code",
                        data: code.bytes(),
                    })
                    .collect();
                Code::new(Cow::Owned(self.link(&inputs, jit)?))
            }
        }
    }

    /// Compiles text to machine code.
    fn compiled(&self, text: &Code<'_>, jit: &mut Jit) -> Result<Code<'static>> {
        let ptx = LinkInput {
            kind: jit_input::PTX,
            name: "managed variables",
            data: text.bytes(),
        };
        Code::machine(Cow::Owned(self.link(&[ptx], jit)?))
    }

    /// Loads code, with its managed variables in `place`.
    fn load_code(
        &self,
        code: &Code<'_>,
        kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        let printing = code.output();
        if !code.names_managed() {
            let loaded = self.load_plain(code, kind, jit, printing);
            return loaded.map(Loading::Done);
        }
        let compiled;
        let code = if code.is_machine() {
            code
        } else {
            compiled = self.compiled(code, jit)?;
            &compiled
        };
        let Some(managed) = managed::Code::read(code.bytes().to_vec())? else {
            // The linker has removed unused variables, or a comment of the PTX has the word. Of the text the driver would
            // allocate the variables.
            let loaded = self.load_plain(code, kind, jit, printing);
            return loaded.map(Loading::Done);
        };
        let bytes = managed.bytes();
        let placed = match place {
            Some(place) => managed.place(place)?,
            None => None,
        };
        let Some(placed) = placed else {
            return Ok(Loading::NeedsPlace(bytes));
        };
        let mut loaded = self.load_plain(&placed.code, kind, jit, printing)?;
        self.images
            .lock()
            .set_managed(loaded.module, placed.globals);
        loaded.initial = placed.initial;
        Ok(Loading::Done(loaded))
    }

    /// Loads code without managed variables.
    fn load_plain(
        &self,
        code: &Code<'_>,
        kind: ImageKind,
        jit: &mut Jit,
        printing: Printing,
    ) -> Result<LoadedModule> {
        let data = code.bytes().as_ptr().cast::<c_void>();
        let mut options = jit::Options::new(jit);
        let (count, keys, values) = (options.count(), options.keys(), options.values());
        let loaded = match kind {
            ImageKind::Module => {
                let mut module = ptr::null_mut();
                // SAFETY: the code is a whole ELF file or a C string, which the driver copies. The options have
                // buffers of their own.
                let loaded = unsafe {
                    self.driver()
                        .cuModuleLoadDataEx(&raw mut module, data, count, keys, values)
                };
                loaded.map(|()| Loaded::Module(module))
            }
            ImageKind::Library => {
                let mut library = ptr::null_mut();
                let (none, no_values) = (ptr::null_mut(), ptr::null_mut());
                // SAFETY: as above; without CU_LIBRARY_BINARY_IS_PRESERVED the driver copies the code.
                let loaded = unsafe {
                    self.driver().cuLibraryLoadData(
                        &raw mut library,
                        data,
                        keys,
                        values,
                        count,
                        none,
                        no_values,
                        0,
                    )
                };
                loaded.map(|()| Loaded::Library(library))
            }
        };
        options.finish(jit);
        let loaded = loaded?;
        let output = printing.summary();
        Ok(LoadedModule {
            module: self.images.lock().insert(Ok(loaded), printing),
            output,
            initial: Vec::new(),
        })
    }

    fn parameters(&self, function: CUfunction) -> Vec<Parameter> {
        let mut parameters = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: a function that the driver has just returned; the pointers are good.
            let found = unsafe {
                self.driver().cuFuncGetParamInfo(
                    function,
                    parameters.len(),
                    &raw mut offset,
                    &raw mut bytes,
                )
            };
            let (Ok(()), Ok(offset), Ok(size)) =
                (found, u32::try_from(offset), u32::try_from(bytes))
            else {
                return parameters;
            };
            parameters.push(Parameter { offset, size });
        }
    }

    fn attributes(&self, raw: RawFunction) -> Vec<(i32, i32)> {
        (0..FUNCTION_ATTRIBUTES_END)
            .filter_map(|id| Some((id, self.function_get_attribute(raw, id).ok()?)))
            .collect()
    }
}

/// Returns whether an environment variable has a value.
fn variable_is(name: &str, value: &str) -> bool {
    std::env::var_os(name).is_some_and(|found| found == value)
}

impl Device for CudaDevice {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn health(&self, probe: &[RawStream]) -> Option<CuError> {
        let handles = *self.context.lock();
        let Some(Handles { sentinel, .. }) = handles else {
            return Some(CuError::CONTEXT_IS_DESTROYED);
        };
        std::iter::once(sentinel)
            .chain(probe.iter().map(|raw| stream(*raw)))
            .find_map(|stream| {
                // SAFETY: the caller names streams that exist.
                unsafe { self.driver().cuStreamQuery(stream) }
                    .err()
                    .filter(|error| is_sticky(*error))
            })
    }

    fn take_output(&self) -> DeviceOutput {
        capture::take()
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        let host = ptr::with_exposed_provenance_mut::<c_void>(size(address));
        let mut device = 0;
        // SAFETY: the range is mapped until it is unregistered, says the caller.
        unsafe {
            self.driver()
                .cuMemHostRegister_v2(host, size(bytes), REGISTER_FLAGS)?;
            self.driver()
                .cuMemHostGetDevicePointer_v2(&raw mut device, host, 0)?;
        }
        if device == address {
            return Ok(());
        }
        // All callers rely on one address for both sides.
        tracing::error!(
            "host memory at {address:#x} is at {device:#x} for the device; such a device cannot be used"
        );
        self.unregister(address)?;
        Err(CuError::NOT_SUPPORTED)
    }

    fn unregister(&self, address: u64) -> Result<()> {
        let host = ptr::with_exposed_provenance_mut::<c_void>(size(address));
        // SAFETY: the driver checks the address.
        unsafe { self.driver().cuMemHostUnregister(host) }
    }

    fn write(&self, destination: u64, data: &[u8], on: RawStream) -> Result<()> {
        let source = data.as_ptr().cast::<c_void>();
        // From pageable memory the driver returns when the source has been copied (CUDA driver API,
        // "API synchronization behavior").
        // SAFETY: the source is readable for its length; the destination was checked by the caller.
        unsafe {
            self.driver()
                .cuMemcpyHtoDAsync_v2(destination, source, data.len(), stream(on))
        }
    }

    fn fill(&self, fill: Fill, on: RawStream) -> Result<()> {
        let (pitch, width, height) = (size(fill.pitch), size(fill.width), size(fill.height));
        let (destination, on) = (fill.destination, stream(on));
        let driver = self.driver();
        let [low, second, ..] = fill.value.to_le_bytes();
        let half = u16::from_le_bytes([low, second]);
        // SAFETY: the destination was checked by the caller.
        unsafe {
            match (fill.element, fill.height) {
                (1, 1) => driver.cuMemsetD8Async(destination, low, width, on),
                (2, 1) => driver.cuMemsetD16Async(destination, half, width, on),
                (4, 1) => driver.cuMemsetD32Async(destination, fill.value, width, on),
                (1, _) => driver.cuMemsetD2D8Async(destination, pitch, low, width, height, on),
                (2, _) => driver.cuMemsetD2D16Async(destination, pitch, half, width, height, on),
                (4, _) => {
                    driver.cuMemsetD2D32Async(destination, pitch, fill.value, width, height, on)
                }
                _ => Err(CuError::INVALID_VALUE),
            }
        }
    }

    fn destroy_stream(&self, raw: RawStream) -> Result<()> {
        self.forget_stream(raw);
        // SAFETY: the caller passes a live stream.
        unsafe { self.driver().cuStreamDestroy_v2(stream(raw)) }
    }

    fn query_stream(&self, raw: RawStream) -> Result<bool> {
        // SAFETY: the caller passes a live stream.
        ready(unsafe { self.driver().cuStreamQuery(stream(raw)) })
    }

    fn synchronize_stream(&self, raw: RawStream) -> Result<()> {
        // SAFETY: the caller passes a live stream.
        unsafe { self.driver().cuStreamSynchronize(stream(raw)) }
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: no arguments.
        unsafe { self.driver().cuCtxSynchronize() }
    }

    fn wait_event(&self, on: RawStream, after: RawEvent, flags: u32) -> Result<()> {
        if let Some(shared) = shared_events::find(after)? {
            return self.wait_shared(on, &shared);
        }
        // SAFETY: the caller passes a live stream and event.
        unsafe {
            self.driver()
                .cuStreamWaitEvent(stream(on), event(after), flags)
        }
    }

    fn write_fence(&self, on: RawStream, address: u64, value: u64) -> Result<()> {
        // SAFETY: the address is in registered memory, which has one address on both sides.
        unsafe {
            self.driver()
                .cuStreamWriteValue64_v2(stream(on), address, value, 0)
        }
    }

    fn create_event(&self, flags: u32) -> Result<RawEvent> {
        if shared_events::is_for_sharing(flags) {
            return self.create_shared(flags);
        }
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is good.
        unsafe { self.driver().cuEventCreate(&raw mut event, flags) }?;
        Ok(RawEvent(handle(event)))
    }

    fn destroy_event(&self, raw: RawEvent) -> Result<()> {
        if shared_events::is_shared(raw) {
            return self.destroy_shared(raw);
        }
        // SAFETY: the caller passes a live event.
        unsafe { self.driver().cuEventDestroy_v2(event(raw)) }
    }

    fn record_event(&self, raw: RawEvent, on: RawStream, flags: u32) -> Result<()> {
        if let Some(shared) = shared_events::find(raw)? {
            return self.record_shared(&shared, on);
        }
        // SAFETY: the caller passes a live event and stream.
        unsafe {
            self.driver()
                .cuEventRecordWithFlags(event(raw), stream(on), flags)
        }
    }

    fn query_event(&self, raw: RawEvent) -> Result<bool> {
        if let Some(shared) = shared_events::find(raw)? {
            return Ok(shared.is_reached());
        }
        // SAFETY: the caller passes a live event.
        ready(unsafe { self.driver().cuEventQuery(event(raw)) })
    }

    fn synchronize_event(&self, raw: RawEvent) -> Result<()> {
        if let Some(shared) = shared_events::find(raw)? {
            return self.synchronize_shared(&shared);
        }
        // SAFETY: the caller passes a live event.
        unsafe { self.driver().cuEventSynchronize(event(raw)) }
    }

    fn try_link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<()> {
        self.with_link(inputs, jit, |_| Ok(()))
    }

    fn link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<Vec<u8>> {
        self.with_link(inputs, jit, |state| self.complete(state))
    }

    fn load(
        &self,
        image: &[u8],
        kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        let ways = alternatives(image, self.arch(), self.forces_ptx);
        let mut refused = ways
            .as_ref()
            .err()
            .copied()
            .unwrap_or(CuError::NO_BINARY_FOR_GPU);
        let mut attempts = Attempts::default();
        for way in ways.unwrap_or_default() {
            attempts.begin(&way)?;
            let code = match self.code(&way, jit) {
                Err(error @ (CuError::INVALID_IMAGE | CuError::NO_BINARY_FOR_GPU)) => {
                    refused = error;
                    break;
                }
                code => code?,
            };
            let loaded = self.load_code(&code, kind, jit, place);
            // The driver decides which code the device runs: only this error selects the next way.
            if !matches!(loaded, Err(CuError::NO_BINARY_FOR_GPU)) {
                return loaded;
            }
        }
        // By default the driver loads a library at its first use, and refuses it then (measured).
        if kind == ImageKind::Module || self.loads_eagerly {
            return Err(refused);
        }
        Ok(Loading::Done(LoadedModule {
            module: self.images.lock().insert(Err(refused), Printing::None),
            output: ImageOutput::None,
            initial: Vec::new(),
        }))
    }

    fn unload(&self, module: RawModule) -> Result<()> {
        let Some(image) = self.images.lock().remove(module)? else {
            return Ok(());
        };
        // SAFETY: the image was loaded and is unloaded once.
        unsafe {
            match image {
                Loaded::Module(module) => self.driver().cuModuleUnload(module),
                Loaded::Library(library) => self.driver().cuLibraryUnload(library),
            }
        }
    }

    fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction> {
        let prints = self.images.lock().prints(module, name);
        let name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let mut function = ptr::null_mut();
        // SAFETY: the image is loaded, the name is a C string, the pointers are good.
        unsafe {
            match self.image(module)? {
                Loaded::Module(module) => {
                    self.driver()
                        .cuModuleGetFunction(&raw mut function, module, name.as_ptr())?;
                }
                Loaded::Library(library) => {
                    let mut kernel = ptr::null_mut();
                    self.driver()
                        .cuLibraryGetKernel(&raw mut kernel, library, name.as_ptr())?;
                    self.driver()
                        .cuKernelGetFunction(&raw mut function, kernel)?;
                }
            }
        }
        let raw = RawFunction(handle(function));
        Ok(LoadedFunction {
            function: raw,
            parameters: self.parameters(function),
            attributes: self.attributes(raw),
            prints,
        })
    }

    fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)> {
        if let Some(managed) = self.images.lock().managed(module, name) {
            return Ok(managed);
        }
        let name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let (mut address, mut bytes) = (0, 0);
        let (to, size) = (&raw mut address, &raw mut bytes);
        // SAFETY: the image is loaded, the name is a C string, the pointers are good.
        unsafe {
            match self.image(module)? {
                Loaded::Module(module) => {
                    self.driver()
                        .cuModuleGetGlobal_v2(to, size, module, name.as_ptr())?;
                }
                Loaded::Library(library) => {
                    self.driver()
                        .cuLibraryGetGlobal(to, size, library, name.as_ptr())?;
                }
            }
        }
        let bytes = bytes as u64;
        if self.described(address)?.holds(address, bytes) {
            return Ok((address, bytes));
        }
        tracing::error!(
            "the driver has a variable of {bytes} bytes at {address:#x}, where it has no such memory of the device"
        );
        Err(CuError::INVALID_IMAGE)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let with_events;
        let attributes = if launch.events.is_empty() {
            launch.attributes
        } else {
            with_events = WithEvents::new(launch)?;
            with_events.all()
        };
        let config = CUlaunchConfig {
            hStream: stream(launch.stream),
            ..configuration(launch.grid, launch.block, launch.shared, attributes)?
        };
        let mut bytes = launch.parameters.len();
        let mut list = parameter_list(launch.parameters, &mut bytes);
        // SAFETY: the caller passes a live function and stream, and live events; the driver reads configuration and
        // parameters during the call and writes none of them.
        unsafe {
            self.driver().cuLaunchKernelEx(
                &raw const config,
                function(launch.function),
                ptr::null_mut(),
                extra(launch.parameters, &mut list),
            )
        }
    }

    fn set_limit(&self, limit: u32, value: u64) -> Result<()> {
        // SAFETY: no pointers.
        unsafe { self.driver().cuCtxSetLimit(limit, size(value)) }
    }

    fn reset(&self) -> Result<()> {
        // Graphs first: the reset unloads the modules of their kernels.
        self.end_graphs();
        let mut context = self.context.lock();
        self.images.lock().clear();
        *self.comparing.lock() = None;
        let shared = shared_events::take(self.device);
        // After a failure the device has no context: nothing of the old one may be used.
        *context = None;
        let renewed = self.renewed();
        self.identity.renew();
        match renewed {
            Ok(handles) => *context = Some(handles),
            Err(_) => current::forget(),
        }
        shared_events::end(shared);
        renewed.map(drop)
    }
}

fn ready(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(CuError::NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: releases the reference that `open` retained; after a failure the end of the process releases it.
        let _ = unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
