//! Kernel launches: checks them, packs their parameters, and writes them to the ring.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;

pub use wormhole_api::constants::launch_attribute::COOPERATIVE;
use wormhole_api::constants::launch_attribute::{
    CLUSTER_DIMENSION, DEVICE_UPDATABLE_KERNEL_NODE, IGNORE, LAUNCH_COMPLETION_EVENT,
    PROGRAMMATIC_EVENT,
};
use wormhole_api::constants::launch_param::{BUFFER_POINTER, BUFFER_SIZE, END};
use wormhole_api::handle::{Event as EventKind, Function as FunctionKind};
use wormhole_api::{Handle, Items, LaunchAttribute, LaunchKernel, Parameter};

use crate::device::{Device, LaunchLimits, attribute as device_attribute};
use crate::error::{CuError, Result};
use crate::memory::with_room;
use crate::object::context::Scope;
use crate::object::event;
use crate::object::function::{self, Configuration, Function, attribute};
use crate::object::stream::Target;
use crate::object::stream::attributes::{ACCESS_POLICY_WINDOW, window_for_device};
use crate::parameter::Pointer;
use crate::types::{CUlaunchAttribute, CUstreamAttrValue};

/// Bytes of packed parameters that suffice for nearly all kernels.
const PARAMETERS: usize = 4096;
/// Greatest number of bytes of packed parameters.
const MOST_PARAMETERS: usize = 32764;
/// Greatest number of attributes of one launch.
const ATTRIBUTES: usize = 24;

/// Geometry and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
}

/// Limits of a device and a function.
#[derive(Clone, Copy, Debug)]
struct Limits<'a> {
    device: &'a LaunchLimits,
    /// Threads of a block of this function.
    threads: u32,
    /// Registers of a thread of this function.
    thread_registers: u32,
    /// Dynamic shared memory of this function, bytes.
    shared: u32,
}

impl<'a> Limits<'a> {
    #[inline(always)]
    fn of(device: &'a Device, function: &Function) -> Self {
        let device = &device.launches;
        let known = |id: i32| {
            function
                .known(id)
                .and_then(|value| u32::try_from(value).ok())
        };
        Self {
            device,
            threads: known(attribute::MAX_THREADS_PER_BLOCK).unwrap_or(device.threads),
            thread_registers: known(attribute::NUM_REGS).unwrap_or(0),
            shared: known(attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES).unwrap_or_else(|| {
                let used = known(attribute::SHARED_SIZE_BYTES).unwrap_or(0);
                device.shared.saturating_sub(used)
            }),
        }
    }

    /// Returns true if the registers suffice for a block of `threads` threads. They are allocated to a warp in units of
    /// 256.
    fn have_registers(&self, threads: u64) -> bool {
        let warp = (u64::from(self.thread_registers) * 32).next_multiple_of(256);
        threads.div_ceil(32) * warp <= u64::from(self.device.registers)
    }
}

impl Shape {
    /// Returns true if the launch needs more shared memory than the function's limit, but no more than the device has.
    #[cold]
    fn needs_more_shared(&self, device: &Device, function: &Function) -> bool {
        let most = device.value(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        self.shared > Limits::of(device, function).shared
            && u32::try_from(most).is_ok_and(|most| self.shared <= most)
    }

    /// Checks what the native driver checks at the call, with its codes.
    #[inline(always)]
    fn check(&self, limits: &Limits<'_>) -> Result {
        let within = |sizes: [u32; 3], limits: [u32; 3]| {
            sizes
                .iter()
                .zip(limits)
                .all(|(size, limit)| (1..=limit).contains(size))
        };
        if !within(self.grid, limits.device.grid) || !within(self.block, limits.device.block) {
            return Err(CuError::INVALID_VALUE);
        }
        let threads: u64 = self.block.iter().map(|size| u64::from(*size)).product();
        if threads > u64::from(limits.device.threads) || self.shared > limits.shared {
            return Err(CuError::INVALID_VALUE);
        }
        if threads > u64::from(limits.threads) {
            // The limit comes from the function's registers, or from its code (`.maxntid`).
            return Err(match limits.have_registers(threads) {
                true => CuError::INVALID_VALUE,
                false => CuError::LAUNCH_OUT_OF_RESOURCES,
            });
        }
        Ok(())
    }
}

/// The packed parameters of one launch.
struct Packed<const BYTES: usize> {
    bytes: [MaybeUninit<u8>; BYTES],
    length: usize,
}

impl<const BYTES: usize> Packed<BYTES> {
    const fn new() -> Self {
        Self {
            bytes: [MaybeUninit::uninit(); BYTES],
            length: 0,
        }
    }

    /// Packs the values that an array of pointers points to.
    #[inline(always)]
    fn gather(&mut self, parameters: &[Parameter], values: Pointer<'_, *mut c_void>) -> Result {
        for (index, parameter) in parameters.iter().enumerate() {
            let (offset, size) = (parameter.offset as usize, parameter.size as usize);
            self.zero_up_to(offset);
            let place = self
                .bytes
                .get_mut(offset..offset + size)
                .ok_or(CuError::NOT_SUPPORTED)?;
            // SAFETY: `kernelParams` has a pointer for each parameter of the function (`cuLaunchKernel`).
            let value = unsafe { values.as_ptr().add(index).read() };
            if value.is_null() {
                return Err(CuError::INVALID_VALUE);
            }
            let place = place.as_mut_ptr().cast::<u8>();
            let value = value.cast_const().cast::<u8>();
            // Nearly all parameters have one of two sizes; with the size known, a copy is one move.
            // SAFETY: each pointer leads to a value of its parameter's size (`cuLaunchKernel`); `place` has as many bytes.
            unsafe {
                match size {
                    4 => place.copy_from_nonoverlapping(value, 4),
                    8 => place.copy_from_nonoverlapping(value, 8),
                    _ => place.copy_from_nonoverlapping(value, size),
                }
            };
            self.length = self.length.max(offset + size);
        }
        Ok(())
    }

    /// Zeroes the padding between parameters, so that no old bytes of the stack leave the process.
    fn zero_up_to(&mut self, offset: usize) {
        if self.length < offset
            && let Some(gap) = self.bytes.get_mut(self.length..offset)
        {
            gap.fill(MaybeUninit::new(0));
        }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: all bytes below `length` were written: parameters by copies, gaps by zeroes.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.length) }
    }
}

/// Returns the parameters that the program has packed itself, from a list that is not null.
fn buffer<'a>(extra: Pointer<'a, *mut c_void>) -> Result<&'a [u8]> {
    let mut extra = extra.as_ptr().cast_const();
    let (mut pointer, mut size) = (std::ptr::null::<u8>(), 0);
    loop {
        // SAFETY: the list goes on until its end mark (`cuLaunchKernel`).
        let key = unsafe { extra.read() }.addr();
        if key == END {
            break;
        }
        // SAFETY: every key but the end mark has a value.
        let value = unsafe { extra.add(1).read() };
        match key {
            BUFFER_POINTER => pointer = value.cast_const().cast(),
            // SAFETY: this key's value points to the size.
            BUFFER_SIZE if !value.is_null() => size = unsafe { value.cast::<usize>().read() },
            _ => return Err(CuError::INVALID_VALUE),
        }
        // SAFETY: the end mark has not come yet.
        extra = unsafe { extra.add(2) };
    }
    match size {
        0 => Ok(&[]),
        _ if pointer.is_null() => Err(CuError::INVALID_VALUE),
        // SAFETY: the list documents that many bytes there, which stay as they are during the call.
        1..=MOST_PARAMETERS => Ok(unsafe { std::slice::from_raw_parts(pointer, size) }),
        _ => Err(CuError::NOT_SUPPORTED),
    }
}

/// Arguments of a launch: `kernelParams` and `extra` of `cuLaunchKernel`, which fit the parameters of the function that
/// is launched.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a> {
    pub values: Pointer<'a, *mut c_void>,
    pub extra: Pointer<'a, *mut c_void>,
}

/// An event that a launch records.
#[derive(Clone, Copy, Debug)]
pub struct LaunchEvent {
    pub event: Handle<EventKind>,
    /// Progress of the launch that completes the event.
    pub when: Milestone,
}

/// Progress of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// All blocks have triggered it or ended.
    Triggered,
    /// All blocks have begun, which triggers it.
    TriggeredByStart,
    /// All blocks have begun.
    Begun,
}

impl LaunchEvent {
    /// Reads an attribute's value: the event, flags of its record, and for a programmatic event whether the start of
    /// blocks triggers it.
    fn read(id: u32, value: &CUstreamAttrValue) -> Result<Self> {
        let event = usize::try_from(value[0]).unwrap_or(usize::MAX);
        let event = event::of_launches(std::ptr::with_exposed_provenance_mut(event))?;
        let [flags, at_block_start] = [value[1] & 0xffff_ffff, value[1] >> 32];
        // The only flag, for external records, is not allowed here.
        if flags == u64::from(event::EXTERNAL) {
            return Err(CuError::ILLEGAL_STATE);
        }
        if flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let when = match (id, at_block_start) {
            (LAUNCH_COMPLETION_EVENT, _) => Milestone::Begun,
            (_, 0) => Milestone::Triggered,
            (..) => Milestone::TriggeredByStart,
        };
        Ok(Self { event, when })
    }

    /// Returns the attribute for the backend, which has the event's handle in place of its pointer.
    fn attribute(&self) -> LaunchAttribute {
        let mut value = [0; 64];
        value[..8].copy_from_slice(&self.event.to_wire().to_le_bytes());
        value[12] = (self.when == Milestone::TriggeredByStart).into();
        let id = match self.when {
            Milestone::Begun => LAUNCH_COMPLETION_EVENT,
            Milestone::Triggered | Milestone::TriggeredByStart => PROGRAMMATIC_EVENT,
        };
        LaunchAttribute {
            id,
            reserved: 0,
            value,
        }
    }
}

/// The attributes of a launch, on the wire.
#[derive(Debug)]
pub struct Attributes {
    /// Attributes without handles, `plain` of them, followed by those of events.
    list: [LaunchAttribute; ATTRIBUTES],
    plain: usize,
    count: usize,
    events: [Option<LaunchEvent>; 2],
    cooperative: bool,
    cluster: [u32; 3],
}

impl Attributes {
    /// Attributes of a launch without any.
    pub const NONE: &Self = &Self::new();

    const fn new() -> Self {
        let empty = LaunchAttribute {
            id: IGNORE,
            reserved: 0,
            value: [0; 64],
        };
        Self {
            list: [empty; ATTRIBUTES],
            plain: 0,
            count: 0,
            events: [None; 2],
            cooperative: false,
            cluster: [0; 3],
        }
    }

    pub fn items(&self) -> Items<'_, LaunchAttribute> {
        Items::new(&self.list[..self.count])
    }

    /// Returns the attributes without handles, which a node stores and reports.
    pub fn plain(&self) -> &[LaunchAttribute] {
        &self.list[..self.plain]
    }

    pub fn events(&self) -> impl Iterator<Item = &LaunchEvent> {
        self.events.iter().flatten()
    }

    fn push(&mut self, attribute: LaunchAttribute) -> Result {
        let place = self.list.get_mut(self.count);
        *place.ok_or(CuError::INVALID_VALUE)? = attribute;
        self.count += 1;
        Ok(())
    }

    pub fn cooperative() -> Self {
        let mut attributes = Self::new();
        attributes.cooperative = true;
        (attributes.plain, attributes.count) = (1, 1);
        attributes.list[0].id = COOPERATIVE;
        attributes.list[0].value[0] = 1;
        attributes
    }

    /// Reads the attributes of `cuLaunchKernelEx`.
    pub fn read(list: impl IntoIterator<Item = CUlaunchAttribute>) -> Result<Self> {
        let mut attributes = Self::new();
        let list = list.into_iter();
        for given in list.filter(|attribute| attribute.id != IGNORE) {
            match given.id {
                PROGRAMMATIC_EVENT | LAUNCH_COMPLETION_EVENT => {
                    // The last value of a repeated attribute applies.
                    let place = usize::from(given.id == LAUNCH_COMPLETION_EVENT);
                    let event = LaunchEvent::read(given.id, &given.value)?;
                    attributes.events[place] = Some(event);
                    continue;
                }
                DEVICE_UPDATABLE_KERNEL_NODE => return Err(CuError::NOT_SUPPORTED),
                _ => {}
            }
            let value = match given.id {
                ACCESS_POLICY_WINDOW => window_for_device(&given.value)?,
                _ => given.value,
            };
            let mut attribute = LaunchAttribute {
                id: given.id,
                reserved: 0,
                value: [0; 64],
            };
            for (bytes, word) in attribute.value.chunks_exact_mut(8).zip(value) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            let words = attribute.value.as_chunks::<4>().0;
            match given.id {
                COOPERATIVE => attributes.cooperative = u32::from_le_bytes(words[0]) != 0,
                CLUSTER_DIMENSION => {
                    attributes.cluster = [0, 1, 2].map(|index| u32::from_le_bytes(words[index]));
                }
                _ => {}
            }
            attributes.push(attribute)?;
        }
        attributes.plain = attributes.count;
        for event in attributes.events.into_iter().flatten() {
            attributes.push(event.attribute())?;
        }
        Ok(attributes)
    }
}

/// Returns a node's value of an attribute: as set, or the default of nodes. Returns nothing for attributes that nodes
/// do not have.
pub fn kernel_attribute(id: u32, set: &[LaunchAttribute]) -> Option<CUstreamAttrValue> {
    // Access policy window, cooperative, cluster dimension and its scheduling, priority, memory synchronization
    // domain map (the domains 0 and 1) and domain, device-updatable, preferred shared memory carveout.
    const ATTRIBUTES: [(u32, u64); 9] = [
        (1, 0),
        (COOPERATIVE, 0),
        (CLUSTER_DIMENSION, 0),
        (5, 0),
        (8, 0),
        (9, 1 << 8),
        (10, 0),
        (13, 0),
        (14, 0),
    ];
    let (_, first) = ATTRIBUTES.iter().find(|(known, _)| *known == id)?;
    let mut value = [*first, 0, 0, 0, 0, 0, 0, 0];
    if let Some(attribute) = set.iter().find(|attribute| attribute.id == id) {
        for (word, bytes) in value.iter_mut().zip(attribute.value.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
    }
    Some(value)
}

/// True if `CUDA_LAUNCH_BLOCKING` makes every launch wait.
static BLOCKING: LazyLock<bool> = LazyLock::new(|| {
    std::env::var("CUDA_LAUNCH_BLOCKING").is_ok_and(|value| !value.is_empty() && value != "0")
});

/// Checks a launch, packs its parameters and hands it to `take`.
#[inline(always)]
pub fn with_launch(
    scope: Scope,
    target: Target,
    function: *mut c_void,
    shape: Shape,
    attributes: &Attributes,
    arguments: Arguments<'_>,
    take: impl FnOnce(Launch<'_>) -> Result,
) -> Result {
    let (handle, facts) = function::find_on(scope, function)?;
    let device = target.device(scope);
    let is_elsewhere = |one: &LaunchEvent| !event::is_on(one.event, device);
    if facts.device != device || attributes.events().any(is_elsewhere) {
        return Err(CuError::INVALID_HANDLE);
    }
    if let Err(error) = check(scope, facts, &shape) {
        let device = scope.session.device();
        return Err(
            match attributes.cooperative && shape.needs_more_shared(device, facts) {
                true => CuError::COOPERATIVE_LAUNCH_TOO_LARGE,
                false => error,
            },
        );
    }
    let take = |parameters: &[u8]| {
        take(Launch {
            handle,
            facts,
            shape: &shape,
            attributes,
            parameters,
        })
    };
    with_parameters(facts, arguments, take)
}

/// Checks a launch as the native driver does at the call, with its codes. Inlined, like `Packed::gather`, because both
/// are parts of every launch.
#[inline(always)]
pub fn check(scope: Scope, facts: &Function, shape: &Shape) -> Result {
    shape.check(&Limits::of(scope.session.device(), facts))
}

/// Packs the arguments of a function and hands them to `take`.
#[inline]
pub fn with_parameters<R>(
    facts: &Function,
    arguments: Arguments<'_>,
    take: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    if !arguments.extra.is_null() {
        if !arguments.values.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let packed = buffer(arguments.extra)?;
        return match facts.parameter_bytes {
            bytes if packed.len() >= bytes => take(packed),
            _ if packed.is_empty() => Err(CuError::INVALID_VALUE),
            bytes if bytes <= PARAMETERS => with_rest::<PARAMETERS, R>(packed, bytes, take),
            bytes => with_rest::<MOST_PARAMETERS, R>(packed, bytes, take),
        };
    }
    if facts.parameters.is_empty() {
        return take(&[]);
    }
    arguments.values.not_null()?;
    if facts.parameter_bytes > PARAMETERS {
        return with_large(facts, arguments.values, take);
    }
    with_values::<PARAMETERS, R>(facts, arguments.values, take)
}

/// Extends a program's own buffer with zeroes. It may be shorter than the parameters: NCCL leaves out those that its
/// kernel will not read.
#[cold]
#[inline(never)]
fn with_rest<const BYTES: usize, R>(
    packed: &[u8],
    bytes: usize,
    take: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    let mut whole = [0; BYTES];
    let whole = whole.get_mut(..bytes).ok_or(CuError::NOT_SUPPORTED)?;
    whole[..packed.len()].copy_from_slice(packed);
    take(whole)
}

#[inline]
fn with_values<const BYTES: usize, R>(
    facts: &Function,
    values: Pointer<'_, *mut c_void>,
    take: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    let mut packed = Packed::<BYTES>::new();
    packed.gather(&facts.parameters, values)?;
    take(packed.as_slice())
}

/// Packs parameters in a large stack frame, which other launches do not need.
#[cold]
#[inline(never)]
fn with_large<R>(
    facts: &Function,
    values: Pointer<'_, *mut c_void>,
    take: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<R> {
    with_values::<MOST_PARAMETERS, R>(facts, values, take)
}

/// A launch that has passed the checks.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub handle: Handle<FunctionKind>,
    facts: &'a Function,
    pub shape: &'a Shape,
    pub attributes: &'a Attributes,
    /// Packed parameters.
    pub parameters: &'a [u8],
}

impl Launch<'_> {
    #[inline(always)]
    pub fn send(self, scope: Scope, target: Target) -> Result {
        let attributes = self.attributes;
        let message = LaunchKernel {
            function: self.handle,
            stream: target.handle,
            grid: self.shape.grid,
            block: self.shape.block,
            shared: self.shape.shared,
            attributes: attributes.items(),
            parameters: self.parameters,
        };
        send(scope, self.facts, self.shape, attributes, &message)?;
        if self.facts.prints {
            target.printed(scope);
        }
        target.launched(scope)?;
        if *BLOCKING {
            target.synchronize(scope)?;
        }
        for recorded in attributes.events() {
            event::recorded_by_launch(recorded.event);
        }
        Ok(())
    }
}

/// Sends a launch: as a request if the device may refuse it at the call, as a record if it has accepted such a launch
/// before.
#[inline(always)]
fn send(
    scope: Scope,
    facts: &Function,
    shape: &Shape,
    attributes: &Attributes,
    message: &LaunchKernel<'_>,
) -> Result {
    let in_clusters = attributes.cluster != [0; 3] || facts.demands_cluster();
    let configuration = || Configuration {
        grid: shape.grid,
        block: shape.block,
        shared: shape.shared,
        cluster: attributes.cluster,
        cooperative: attributes.cooperative,
    };
    let special = attributes.cooperative || in_clusters;
    let is_accepted = match special {
        true => facts.agreed(&configuration()),
        false => facts.launched.load(Ordering::Relaxed),
    };
    if is_accepted {
        // One place, so that the compiler inlines it.
        return scope.session.record(message);
    }
    with_room(|| request(scope, message))?;
    facts.launched.store(true, Ordering::Relaxed);
    if special {
        facts.agree(configuration());
    }
    Ok(())
}

#[cold]
fn request(scope: Scope, message: &LaunchKernel<'_>) -> Result {
    scope.session.request(message, |()| ())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits<'static> = Limits {
        device: &LaunchLimits {
            grid: [2_147_483_647, 65535, 65535],
            block: [1024, 1024, 64],
            threads: 1024,
            registers: 65536,
            shared: 49152,
        },
        threads: 768,
        thread_registers: 81,
        shared: 49152,
    };

    fn shape(grid: [u32; 3], block: [u32; 3], shared: u32) -> Shape {
        Shape {
            grid,
            block,
            shared,
        }
    }

    #[test]
    fn geometry_is_refused_with_the_native_codes() {
        assert_eq!(shape([1; 3], [768, 1, 1], 49152).check(&LIMITS), Ok(()));
        for refused in [
            shape([0, 1, 1], [1; 3], 0),
            shape([1; 3], [0, 1, 1], 0),
            shape([1, 65536, 1], [1; 3], 0),
            shape([1; 3], [1025, 1, 1], 0),
            shape([1; 3], [1, 1, 65], 0),
            shape([1; 3], [32, 33, 1], 0),
            shape([1; 3], [1; 3], 49153),
        ] {
            assert_eq!(
                refused.check(&LIMITS),
                Err(CuError::INVALID_VALUE),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn what_bounds_a_kernels_blocks_makes_the_code() {
        let many = shape([1; 3], [769, 1, 1], 0);
        assert_eq!(many.check(&LIMITS), Err(CuError::LAUNCH_OUT_OF_RESOURCES));
        // 80 registers of each thread are there for 800 threads, but no more.
        let bound = Limits {
            threads: 128,
            thread_registers: 80,
            ..LIMITS
        };
        for (threads, error) in [
            (128, Ok(())),
            (129, Err(CuError::INVALID_VALUE)),
            (800, Err(CuError::INVALID_VALUE)),
            (801, Err(CuError::LAUNCH_OUT_OF_RESOURCES)),
            (1025, Err(CuError::INVALID_VALUE)),
        ] {
            let launch = shape([1; 3], [threads, 1, 1], 0);
            assert_eq!(launch.check(&bound), error, "{threads}");
        }
    }

    fn pointer(list: &[*mut c_void]) -> Pointer<'_, *mut c_void> {
        // SAFETY: each test makes a list as `cuLaunchKernel` documents it.
        unsafe { Pointer::new(list.as_ptr().cast_mut()) }
    }

    #[test]
    fn a_packed_buffer_is_taken_as_it_is() {
        let bytes: Vec<u8> = (0..100).collect();
        let mut size = bytes.len();
        let list = [
            std::ptr::without_provenance_mut(BUFFER_POINTER),
            bytes.as_ptr().cast_mut().cast::<c_void>(),
            std::ptr::without_provenance_mut(BUFFER_SIZE),
            (&raw mut size).cast::<c_void>(),
            std::ptr::null_mut(),
        ];
        let found = buffer(pointer(&list));
        assert_eq!(found, Ok(&bytes[..]));
        let mut long = MOST_PARAMETERS + 1;
        let list = [list[0], list[1], list[2], (&raw mut long).cast(), list[4]];
        let refused = buffer(pointer(&list));
        assert_eq!(refused, Err(CuError::NOT_SUPPORTED));
    }

    #[test]
    fn cluster_and_cooperative_attributes_are_understood() {
        let mut value = [0; 8];
        value[0] = 2 | 1 << 32;
        value[1] = 1;
        let cluster = CUlaunchAttribute {
            id: CLUSTER_DIMENSION,
            pad: [0; 4],
            value,
        };
        let attributes = Attributes::read([cluster]).unwrap();
        assert_eq!(attributes.cluster, [2, 1, 1]);
        assert!(!attributes.cooperative);
        let event = CUlaunchAttribute {
            id: 7,
            pad: [0; 4],
            value: [0; 8],
        };
        assert_eq!(
            Attributes::read([event]).unwrap_err(),
            CuError::INVALID_HANDLE
        );
        let node = CUlaunchAttribute { id: 13, ..event };
        assert_eq!(
            Attributes::read([node]).unwrap_err(),
            CuError::NOT_SUPPORTED
        );
        let many = [CUlaunchAttribute {
            id: 8,
            pad: [0; 4],
            value: [0; 8],
        }; ATTRIBUTES + 1];
        assert_eq!(Attributes::read(many).unwrap_err(), CuError::INVALID_VALUE);
    }

    #[test]
    fn a_window_that_the_device_does_not_reach_is_refused_at_the_call() {
        let word = 7_u64;
        let window = |bytes| CUlaunchAttribute {
            id: ACCESS_POLICY_WINDOW,
            pad: [0; 4],
            value: [(&raw const word).addr() as u64, bytes, 0, 0, 0, 0, 0, 0],
        };
        let refused = Attributes::read([window(8)]).unwrap_err();
        assert_eq!(refused, CuError::INVALID_VALUE);
        let empty = Attributes::read([window(0)]).unwrap();
        assert_eq!(empty.plain().len(), 1);
    }

    proptest! {
        /// Checks that every parameter's bytes are at its offset, and that every gap is zero.
        #[test]
        fn parameters_are_packed_at_their_offsets(sizes in prop::collection::vec((0..9_u32, 1..40_u32), 0..20)) {
            let mut layout = Vec::new();
            let mut offset = 0;
            for (gap, size) in &sizes {
                offset += gap;
                layout.push(Parameter { offset, size: *size });
                offset += size;
            }
            let mut values: Vec<Vec<u8>> = layout
                .iter()
                .enumerate()
                .map(|(index, parameter)| vec![u8::try_from(index + 1).unwrap(); parameter.size as usize])
                .collect();
            let pointers: Vec<*mut c_void> =
                values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
            let mut packed = Packed::<PARAMETERS>::new();
            packed.gather(&layout, pointer(&pointers)).unwrap();
            let mut wanted = vec![0; offset as usize];
            for (parameter, value) in layout.iter().zip(&values) {
                wanted[parameter.offset as usize..][..value.len()].copy_from_slice(value);
            }
            prop_assert_eq!(packed.as_slice(), wanted);
        }
    }
}
