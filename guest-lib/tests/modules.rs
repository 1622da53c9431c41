//! Messages that the library sends for modules, and whether it waits.

mod support;

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cuda as _;
use support::calls::launch;
use support::{Backend, in_process};
use wormhole_api::CuResult;

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> u32;
    fn cuModuleUnload(module: Pointer) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> u32;
    fn cuModuleGetGlobal_v2(
        address: *mut u64,
        bytes: *mut usize,
        module: Pointer,
        name: *const c_char,
    ) -> u32;
    fn cuStreamCreate(stream: *mut Pointer, flags: u32) -> u32;
    fn cuStreamBeginCapture_v2(stream: Pointer, mode: u32) -> u32;
    fn cuStreamEndCapture(stream: Pointer, graph: *mut Pointer) -> u32;
    fn cuGraphInstantiateWithFlags(made: *mut Pointer, graph: Pointer, flags: u64) -> u32;
}

const INVALID_HANDLE: u32 = CuResult::INVALID_HANDLE.0;
const LAUNCH_FAILED: u32 = CuResult::LAUNCH_FAILED.0;

struct Ready {
    backend: Backend,
    stream: Pointer,
}

fn ready() -> Ready {
    let backend = Backend::start();
    let [mut context, mut stream] = [null_mut(); 2];
    // SAFETY: every place is writable, the handle is the library's.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
    }
    Ready { backend, stream }
}

impl Ready {
    fn launch(&self, function: Pointer) {
        launch(function, self.stream);
    }
}

fn load() -> Pointer {
    let mut module = null_mut();
    // SAFETY: the place is writable, the image is a C string.
    let loaded = unsafe { cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()) };
    assert_eq!(loaded, 0);
    module
}

fn unload(module: Pointer) -> u32 {
    // SAFETY: any pointer is refused or a handle.
    unsafe { cuModuleUnload(module) }
}

fn look_up(module: Pointer) -> Pointer {
    let mut function = null_mut();
    // SAFETY: the place is writable, the handle is the library's.
    let found = unsafe { cuModuleGetFunction(&raw mut function, module, c"kernel".as_ptr()) };
    assert_eq!(found, 0);
    function
}

/// The driver may load a kernel or a variable at its first use.
#[test]
fn an_image_and_what_is_in_it_finds_memory_that_the_library_keeps() {
    const OUT_OF_MEMORY: u32 = CuResult::OUT_OF_MEMORY.0;
    in_process(|| {
        let ready = ready();
        let (module, name) = (load(), c"thing".as_ptr());
        let uses: [(&str, &dyn Fn() -> u32); 3] = [
            ("ModuleLoad?", &|| {
                let (mut module, image) = (null_mut(), c".version 8.0".as_ptr().cast());
                // SAFETY: the place is writable, the image is a C string.
                unsafe { cuModuleLoadData(&raw mut module, image) }
            }),
            ("ModuleGetFunction?", &|| {
                let mut function = null_mut();
                // SAFETY: the place is writable, the handle is the library's.
                unsafe { cuModuleGetFunction(&raw mut function, module, name) }
            }),
            ("ModuleGetGlobal?", &|| {
                let (mut address, mut bytes) = (0, 0);
                // SAFETY: the places are writable, the handle is the library's.
                unsafe { cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name) }
            }),
        ];
        let lacks_memory = &ready.backend.shared.lacks_memory;
        for (message, used) in uses {
            lacks_memory.store(false, Ordering::Release);
            ready.backend.messages();
            let mut address = 0;
            // SAFETY: the place is writable, and nothing uses the memory.
            unsafe {
                assert_eq!(cuMemAlloc_v2(&raw mut address, 4 << 20), 0);
                assert_eq!(cuMemFree_v2(address), 0);
            }
            lacks_memory.store(true, Ordering::Release);
            assert_eq!(used(), OUT_OF_MEMORY);
            let sent = ["MemAlloc?", message, "MemFree?", message];
            assert_eq!(ready.backend.shared.take(), sent);
        }
    });
}

#[test]
fn only_a_module_that_the_device_may_be_using_is_waited_for() {
    /// Uses a module.
    type Use = fn(&Ready, Pointer);
    let uses: [(&str, Use); 5] = [
        ("ModuleUnload", |_, _| ()),
        ("ModuleUnload", |_, module| _ = look_up(module)),
        ("ModuleUnload?", |ready, module| {
            ready.launch(look_up(module))
        }),
        ("ModuleUnload?", |_, module| {
            let (mut address, mut bytes) = (0, 0);
            let name = c"variable".as_ptr();
            // SAFETY: the places are writable, the handle is the library's.
            let found =
                unsafe { cuModuleGetGlobal_v2(&raw mut address, &raw mut bytes, module, name) };
            assert_eq!(found, 0);
        }),
        ("ModuleUnload?", |ready, module| {
            let [mut graph, mut made] = [null_mut(); 2];
            // SAFETY: the places are writable, the handles are the library's.
            unsafe {
                assert_eq!(cuStreamBeginCapture_v2(ready.stream, 2), 0);
                ready.launch(look_up(module));
                assert_eq!(cuStreamEndCapture(ready.stream, &raw mut graph), 0);
                assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
            }
        }),
    ];
    for (message, used) in uses {
        in_process(|| {
            let ready = ready();
            let module = load();
            used(&ready, module);
            ready.backend.messages();
            assert_eq!(unload(module), 0);
            assert_eq!(ready.backend.messages(), [message]);
            assert_eq!(unload(module), INVALID_HANDLE);
            assert_eq!(ready.backend.messages(), [""; 0]);
        });
    }
}

#[test]
fn after_a_fault_a_module_is_not_unloaded() {
    in_process(|| {
        let ready = ready();
        let module = load();
        ready.backend.messages();
        ready.backend.fail(CuResult::LAUNCH_FAILED);
        assert_eq!(unload(module), LAUNCH_FAILED);
        assert_eq!(ready.backend.shared.take(), [""; 0]);
    });
}
