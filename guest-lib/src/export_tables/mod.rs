//! The tables of `cuGetExportTable`: functions of the driver that CUDA's runtime and libraries call besides the
//! documented ones.
//!
//! Names, slots and meanings are as ZLUDA (version 5, `dark_api`, `zluda/src/impl/driver.rs`) publishes them, and as
//! observed on the native driver from outside: which slots are called, with which arguments, and how callers use the
//! results. A table that is not listed here is refused as the native driver refuses an unknown one.

mod compilations;
mod consistency;

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;

use wormhole_api::handle::Module as ModuleKind;

use self::compilations::{
    ask_compilation, find_compilation, forget_question, free_compilation, keep_compilation,
};
use crate::calls::{self, code};
use crate::device::attribute;
use crate::error::{CuError, Result};
use crate::object::context::{self, Context};
use crate::object::jit::Logs;
use crate::object::storage::Destructor;
use crate::object::stream;
use crate::object::{image, jit, module};
use crate::parameter::{Out, Pointer};
use crate::session::session;
use crate::types::{CUcontext, CUdevice, CUfunction, CUmodule, CUresult, CUstream, DefaultStream};

/// A table: function addresses, and in word 0 its size in bytes, if it has a size word.
#[repr(transparent)]
struct Words<const N: usize>([*const c_void; N]);

// SAFETY: the words are constants.
unsafe impl<const N: usize> Sync for Words<N> {}

impl<const N: usize> Words<N> {
    /// Makes a table whose slots return `NOT_SUPPORTED` unless they are listed.
    const fn with(slots: &[(usize, *const c_void)]) -> Self {
        let mut words = [unused as *const c_void; N];
        words[0] = ptr::without_provenance(N * size_of::<usize>());
        let mut index = 0;
        while index < slots.len() {
            words[slots[index].0] = slots[index].1;
            index += 1;
        }
        Self(words)
    }

    const fn start(&'static self) -> *const c_void {
        (&raw const self.0).cast()
    }
}

macro_rules! tables {
    ($($(#[$doc:meta])* $name:ident [$words:literal] = { $($slot:literal => $function:ident,)* })*) => {
        $($(#[$doc])* static $name: Words<$words> =
            Words::with(&[$(($slot, $function as *const c_void),)*]);)*

        /// Slots that are served. Addresses cannot identify them: a function may have several addresses, and two
        /// functions may share one.
        #[cfg(test)]
        mod served {
            $(pub const $name: &[usize] = &[$($slot),*];)*
        }
    };
}

tables! {
    RUNTIME_INTERFACE[13] = {
        1 => load_wrapped,
        2 => primary_context,
        6 => load_result_first,
        7 => succeed,
        8 => load_image_first,
        12 => succeed,
    }
    CALLBACK_FLAGS[7] = {
        1 => succeed,
        2 => first_flags,
        3 => succeed,
        4 => succeed,
        5 => succeed,
        6 => second_flags,
    }
    CURRENT_CONTEXT[3] = {
        2 => current_context,
    }
    /// Table without a size word: slot 0 is a function.
    CONTEXT_STORAGE[4] = {
        0 => storage_put,
        1 => storage_delete,
        2 => storage_get,
    }
    CONTEXT_CHECKS[15] = {
        2 => check_context,
        3 => succeed,
    }
    CONSISTENCY[3] = {
        1 => check_consistency,
    }
    STREAM_OBJECTS[93] = {
        4 => answers_one,
        39 => object_stream_id,
        51 => stream_object,
    }
    /// Requested by cuBLASLt, which ends the process without the table, but needs none of its slots.
    OPAQUE_OBJECTS[17] = {}
    /// Requested by cuFFT.
    MODULE_FUNCTIONS[99] = {
        7 => visit_functions,
    }
    /// Requested by NVRTC, which without the table compiles the same source again each time.
    COMPILATIONS[7] = {
        1 => ask_compilation,
        2 => forget_question,
        3 => find_compilation,
        4 => keep_compilation,
        6 => free_compilation,
    }
}

/// Returns the table with an identifier.
pub fn find(id: &[u8; 16]) -> Option<*const c_void> {
    Some(match u128::from_be_bytes(*id) {
        0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9 => RUNTIME_INTERFACE.start(),
        0xa094_798c_2e74_2e74_93f2_0800_200c_0a66 => CALLBACK_FLAGS.start(),
        0x42d8_5a81_23f6_cb47_8298_f6e7_8a3a_ecdc => CURRENT_CONTEXT.start(),
        0xc693_336e_1121_df11_a8c3_68f3_55d8_9593 => CONTEXT_STORAGE.start(),
        0x263e_8860_7cd2_6143_92f6_bbd5_006d_fa7e => CONTEXT_CHECKS.start(),
        0xd408_2055_bde6_704b_8d34_ba12_3c66_e1f2 => CONSISTENCY.start(),
        0x2131_8c60_9714_3248_8ca6_41ff_7324_c8f2 => STREAM_OBJECTS.start(),
        0x1734_dc26_800d_4745_8726_c0f1_e7dd_8bca => OPAQUE_OBJECTS.start(),
        0x6e16_3fbe_b958_444d_835c_e182_aff1_991e => MODULE_FUNCTIONS.start(),
        0xda91_51d3_3ae6_cc41_a5c0_4f26_d533_e328 => COMPILATIONS.start(),
        _ => return None,
    })
}

extern "C" fn unused() -> CUresult {
    CuError::NOT_SUPPORTED.0
}

extern "C" fn succeed() -> CUresult {
    0
}

/// Returns the handle of the primary context, without making it active.
extern "C" fn primary_context(place: Out<'_, CUcontext>, device: CUdevice) -> CUresult {
    let primary = calls::ordinal(device).and_then(context::primary_context);
    code(primary.and_then(|(_, handle)| place.put(handle)))
}

fn load(place: Out<'_, CUmodule>, wrapper: Pointer<'_, c_void>) -> Result {
    let scope = context::scope()?;
    let bytes = image::bytes(wrapper)?;
    let handle = module::load::<ModuleKind>(scope, &bytes, None, &jit::NONE, &mut Logs::default())?;
    place.put(handle)
}

extern "C" fn load_wrapped(place: Out<'_, CUmodule>, wrapper: Pointer<'_, c_void>) -> CUresult {
    code(load(place, wrapper))
}

extern "C" fn load_result_first(
    place: Out<'_, CUmodule>,
    wrapper: Pointer<'_, c_void>,
    _: *mut c_void,
    _: *mut c_void,
    _: u32,
) -> CUresult {
    code(load(place, wrapper))
}

extern "C" fn load_image_first(
    image: Pointer<'_, c_void>,
    place: Out<'_, CUmodule>,
    _: *mut c_void,
    _: *mut c_void,
    _: u32,
) -> CUresult {
    code(load(place, image))
}

/// Flags per callback, all zero, which the runtime reads and a profiler would set.
#[repr(transparent)]
struct Flags<const N: usize>(UnsafeCell<[u32; N]>);

// SAFETY: the words belong to the runtime; this library never touches them.
unsafe impl<const N: usize> Sync for Flags<N> {}

impl<const N: usize> Flags<N> {
    fn give(&'static self, buffer: Out<'_, *mut c_void>, length: Out<'_, usize>) {
        buffer.put_if_wanted(self.0.get().cast());
        length.put_if_wanted(N);
    }
}

static FIRST_FLAGS: Flags<1024> = Flags(UnsafeCell::new([0; 1024]));
static SECOND_FLAGS: Flags<14> = Flags(UnsafeCell::new([0; 14]));

extern "C" fn first_flags(buffer: Out<'_, *mut c_void>, length: Out<'_, usize>) {
    FIRST_FLAGS.give(buffer, length);
}

extern "C" fn second_flags(buffer: Out<'_, *mut c_void>, length: Out<'_, usize>) {
    SECOND_FLAGS.give(buffer, length);
}

extern "C" fn current_context(place: Out<'_, CUcontext>) -> CUresult {
    code(session().and_then(|_| place.put(context::current())))
}

/// Returns the context of a storage call: null and all ones mean the current one.
#[inline]
fn storage_context(ctx: CUcontext) -> Result<&'static Context> {
    session()?;
    let ctx = if ctx.is_null() || ctx.addr() == usize::MAX {
        context::current()
    } else {
        ctx
    };
    context::find(ctx)
        .map(|(context, _)| context)
        .ok_or(CuError::INVALID_CONTEXT)
}

extern "C" fn storage_put(
    ctx: CUcontext,
    key: *mut c_void,
    value: *mut c_void,
    destructor: Option<Destructor>,
) -> CUresult {
    code(storage_context(ctx).map(|context| {
        context.storage().put(
            key.expose_provenance(),
            value.expose_provenance(),
            destructor,
        );
    }))
}

extern "C" fn storage_delete(ctx: CUcontext, key: *mut c_void) -> CUresult {
    code(storage_context(ctx).and_then(|context| {
        if context.storage().delete(key.addr()) {
            Ok(())
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }))
}

extern "C" fn storage_get(
    place: Out<'_, *mut c_void>,
    ctx: CUcontext,
    key: *mut c_void,
) -> CUresult {
    code(storage_context(ctx).and_then(|context| {
        let value = context
            .storage()
            .get(key.addr())
            .ok_or(CuError::INVALID_HANDLE)?;
        place.put(ptr::with_exposed_provenance_mut(value))
    }))
}

/// Clears the flag. The second result stays unchanged: clearing it breaks `cublasCreate`.
extern "C" fn check_context(_: CUcontext, flag: Out<'_, u32>, _: *mut *mut c_void) -> CUresult {
    code(flag.put(0))
}

extern "C" fn check_consistency(
    version: u32,
    unix_seconds: u64,
    result: Out<'_, [u64; 2]>,
) -> CUresult {
    code(session().and_then(|session| {
        // SAFETY: takes no argument and cannot fail.
        let thread = unsafe { libc::pthread_self() };
        let process = consistency::Process {
            driver_version: calls::driver_version().cast_unsigned(),
            version,
            process: std::process::id(),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the low half is what counts"
            )]
            thread: thread as u32,
            runtime_table: RUNTIME_INTERFACE.start().addr() as u64,
            check_table: CONSISTENCY.start().addr() as u64,
            check_function: (check_consistency as *const c_void).addr() as u64,
            unix_seconds,
        };
        let devices = session.devices().iter().map(|device| consistency::Device {
            uuid: device.uuid,
            pci_domain: device.value(attribute::PCI_DOMAIN_ID),
            pci_bus: device.value(attribute::PCI_BUS_ID),
            pci_device: device.value(attribute::PCI_DEVICE_ID),
        });
        result.put(consistency::answer(&process, devices))
    }))
}

extern "C" fn answers_one(_: CUcontext, place: Out<'_, u32>) -> CUresult {
    code(place.put(1))
}

/// Returns the stream's identity as its object: callers pass it back and never dereference it.
extern "C" fn stream_object(
    _: CUcontext,
    stream: CUstream,
    place: Out<'_, *mut c_void>,
) -> CUresult {
    code(
        stream::target(DefaultStream::Legacy, stream).and_then(|(_, target)| {
            let id = target.stream.id.load(std::sync::atomic::Ordering::Relaxed);
            place.put(ptr::without_provenance_mut(
                usize::try_from(id).unwrap_or(0),
            ))
        }),
    )
}

extern "C" fn object_stream_id(_: CUcontext, object: *mut c_void, place: Out<'_, u32>) -> CUresult {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "identities are counted from 1"
    )]
    let id = object.addr() as u32;
    code(place.put(id))
}

/// Calls `visit` with each function of a module, in the order of `cuModuleEnumerateFunctions`. Returns the number of
/// functions.
extern "C" fn visit_functions(
    _: CUcontext,
    module: CUmodule,
    visit: Option<unsafe extern "C" fn(user: *mut c_void, function: CUfunction)>,
    user: *mut c_void,
) -> u32 {
    let functions = || {
        let visit = visit.ok_or(CuError::INVALID_VALUE)?;
        let functions = module::functions::<ModuleKind>(context::scope()?, module, usize::MAX)?;
        for function in &functions {
            // SAFETY: the program passes a function that takes its argument and a function of the module.
            unsafe { visit(user, *function) };
        }
        Ok(functions.len())
    };
    let visited: Result<usize> = functions();
    visited.map_or(0, |count| u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes in words and slots as the runtime of CUDA 13 finds them on the native driver.
    #[test]
    fn tables_have_the_sizes_and_slots_that_runtimes_expect() {
        fn check<const N: usize>(
            table: &Words<N>,
            words: usize,
            served: &[usize],
            slots: &[usize],
        ) {
            assert_eq!((N, served), (words, slots));
            if !slots.contains(&0) {
                assert_eq!(table.0[0].addr(), words * 8);
            }
            for slot in (1..N).filter(|slot| !slots.contains(slot)) {
                // SAFETY: a slot that is not served is `unused`, and a table holds only addresses of functions.
                let function: extern "C" fn() -> CUresult =
                    unsafe { std::mem::transmute(table.0[slot]) };
                assert_eq!(function(), CuError::NOT_SUPPORTED.0, "slot {slot}");
            }
        }
        macro_rules! check {
            ($($table:ident: $words:literal, $slots:expr;)*) => {
                $(check(&$table, $words, served::$table, &$slots);)*
            };
        }
        check! {
            RUNTIME_INTERFACE: 13, [1, 2, 6, 7, 8, 12];
            CALLBACK_FLAGS: 7, [1, 2, 3, 4, 5, 6];
            CURRENT_CONTEXT: 3, [2];
            CONTEXT_STORAGE: 4, [0, 1, 2];
            CONTEXT_CHECKS: 15, [2, 3];
            CONSISTENCY: 3, [1];
            STREAM_OBJECTS: 93, [4, 39, 51];
            OPAQUE_OBJECTS: 17, [];
            MODULE_FUNCTIONS: 99, [7];
            COMPILATIONS: 7, [1, 2, 3, 4, 6];
        }
    }

    #[test]
    fn an_unknown_table_is_refused() {
        assert!(find(&[0; 16]).is_none());
        let runtime = [
            0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd,
            0x9d, 0xf9,
        ];
        assert_eq!(find(&runtime), Some(RUNTIME_INTERFACE.start()));
    }

    #[test]
    fn callback_flags_are_arrays_of_zero_words() {
        let (mut buffer, mut length) = (ptr::null_mut::<c_void>(), 0);
        first_flags((&mut buffer).into(), (&mut length).into());
        assert_eq!(length, 1024);
        // SAFETY: the buffer has that many words.
        let words = unsafe { std::slice::from_raw_parts(buffer.cast::<u32>(), length) };
        assert!(words.iter().all(|word| *word == 0));
        second_flags((&mut buffer).into(), (&mut length).into());
        assert_eq!(length, 14);
    }
}
