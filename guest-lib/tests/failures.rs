//! A launch fails asynchronously, and the backend notices it while a call waits: the call returns that error,
//! whatever the backend's reply to the call itself.

mod support;

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cuda as _;
use support::{Backend, in_process};
use wormhole_api::constants::image_flags::{ANY_KERNEL_PRINTS, USES_OUTPUT};

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuCtxGetLimit(value: *mut usize, limit: u32) -> u32;
    fn cuStreamCreate(stream: *mut Pointer, flags: u32) -> u32;
    fn cuStreamDestroy_v2(stream: Pointer) -> u32;
    fn cuStreamSynchronize(stream: Pointer) -> u32;
    fn cuStreamQuery(stream: Pointer) -> u32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> u32;
    fn cuModuleUnload(module: Pointer) -> u32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> u32;
    fn cuLaunchKernel(
        function: Pointer,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: Pointer,
        parameters: *mut Pointer,
        extra: *mut Pointer,
    ) -> u32;
    fn cuEventCreate(event: *mut Pointer, flags: u32) -> u32;
    fn cuEventRecord(event: Pointer, stream: Pointer) -> u32;
    fn cuEventQuery(event: Pointer) -> u32;
    fn cuEventSynchronize(event: Pointer) -> u32;
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: Pointer, end: Pointer) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    fn cuMemcpyHtoD_v2(destination: u64, source: *const c_void, bytes: usize) -> u32;
    fn cuMemcpyDtoH_v2(destination: Pointer, source: u64, bytes: usize) -> u32;
    fn cuMemHostAlloc(pointer: *mut Pointer, bytes: usize, flags: u32) -> u32;
    fn cuMemFreeHost(pointer: Pointer) -> u32;
    fn cuGraphCreate(graph: *mut Pointer, flags: u32) -> u32;
    fn cuGraphInstantiateWithFlags(made: *mut Pointer, graph: Pointer, flags: u64) -> u32;
    fn cuGraphLaunch(executable: Pointer, stream: Pointer) -> u32;
}

const NOT_READY: u32 = wormhole_api::CuResult::NOT_READY.0;
const ILLEGAL_ADDRESS: u32 = wormhole_api::CuResult::ILLEGAL_ADDRESS.0;

/// Process with a kernel, a blocking stream, and the objects that the calls below name.
struct Ready {
    backend: Backend,
    module: Pointer,
    function: Pointer,
    stream: Pointer,
    /// Event recorded before the kernel. `behind` and `fenced` are recorded after it; only `fenced` has a fence.
    before: Pointer,
    behind: Pointer,
    fenced: Pointer,
    memory: u64,
    pinned: Pointer,
    graph: Pointer,
    executable: Pointer,
}

fn ready(prints: bool) -> Ready {
    let backend = Backend::start();
    let flags = if prints {
        USES_OUTPUT | ANY_KERNEL_PRINTS
    } else {
        0
    };
    backend.shared.image_flags.store(flags, Ordering::Release);
    let [mut context, mut module, mut function, mut stream] = [null_mut(); 4];
    let [mut before, mut behind, mut fenced] = [null_mut(); 3];
    let [mut pinned, mut graph, mut executable] = [null_mut(); 3];
    let mut memory = 0;
    // SAFETY: every place is writable, and the image is text that ends.
    let results = unsafe {
        [
            cuInit(0),
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            cuCtxSetCurrent(context),
            cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
            cuModuleGetFunction(&raw mut function, module, c"kernel".as_ptr()),
            cuStreamCreate(&raw mut stream, 0),
            cuEventCreate(&raw mut before, 0),
            cuEventCreate(&raw mut behind, 0),
            cuEventCreate(&raw mut fenced, 0),
            cuMemAlloc_v2(&raw mut memory, 4096),
            cuMemHostAlloc(&raw mut pinned, 4096, 0),
            cuGraphCreate(&raw mut graph, 0),
            cuGraphInstantiateWithFlags(&raw mut executable, graph, 0),
            cuEventRecord(before, stream),
            // After one synchronize, later records of the event write a fence.
            cuEventRecord(fenced, stream),
            cuEventSynchronize(fenced),
            launch(function, stream),
            cuStreamSynchronize(stream),
        ]
    };
    assert_eq!(results, [0; 18]);
    Ready {
        backend,
        module,
        function,
        stream,
        before,
        behind,
        fenced,
        memory,
        pinned,
        graph,
        executable,
    }
}

/// Launches the kernel.
///
/// # Safety
/// `function` is live and has one parameter of four bytes; `stream` is live.
unsafe fn launch(function: Pointer, stream: Pointer) -> u32 {
    let mut value = 7_u32;
    let mut parameters = [(&raw mut value).cast()];
    let parameters = parameters.as_mut_ptr();
    // SAFETY: as the caller promises.
    unsafe {
        cuLaunchKernel(
            function,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            parameters,
            null_mut(),
        )
    }
}

/// Repeats a query until the result is not `NOT_READY`.
fn poll(ask: impl Fn() -> u32) -> u32 {
    loop {
        match ask() {
            NOT_READY => std::thread::yield_now(),
            answer => return answer,
        }
    }
}

/// Calls that wait for the device, or for the backend's reply.
const CALLS: [&str; 23] = [
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuStreamSynchronize of the legacy stream",
    "cuStreamDestroy and a wait for all streams",
    "cuStreamQuery",
    "cuStreamQuery of the legacy stream",
    "cuEventSynchronize",
    "cuEventSynchronize with a fence",
    "cuEventQuery",
    "cuEventQuery with a fence",
    "cuEventElapsedTime",
    "cuMemcpyDtoH of ordinary memory",
    "cuMemcpyDtoH of pinned memory",
    "cuMemcpyHtoD of pinned memory",
    "cuMemcpyHtoD of ordinary memory",
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemAlloc",
    "cuMemGetInfo",
    "cuCtxGetLimit",
    "cuModuleUnload",
    "cuGraphInstantiate and a wait",
    "cuGraphLaunch and a wait",
];

fn call(name: &str, ready: &Ready) -> u32 {
    let (mut bytes, mut word, mut other) = ([0_u8; 64], 0_usize, 0_usize);
    let (mut address, mut milliseconds, mut made) = (0_u64, 0_f32, null_mut());
    let ordinary: Pointer = bytes.as_mut_ptr().cast();
    let Ready {
        module,
        stream,
        before,
        behind,
        fenced,
        memory,
        pinned,
        graph,
        executable,
        ..
    } = *ready;
    // SAFETY: the objects of the calls are alive, every place is writable, and each copy is as long as the buffers.
    unsafe {
        match name {
            "cuCtxSynchronize" => cuCtxSynchronize(),
            "cuStreamSynchronize" => cuStreamSynchronize(stream),
            "cuStreamSynchronize of the legacy stream" => cuStreamSynchronize(null_mut()),
            // The stream's work continues.
            "cuStreamDestroy and a wait for all streams" => match cuStreamDestroy_v2(stream) {
                0 => cuCtxSynchronize(),
                error => error,
            },
            "cuStreamQuery" => poll(|| cuStreamQuery(stream)),
            "cuStreamQuery of the legacy stream" => poll(|| cuStreamQuery(null_mut())),
            "cuEventSynchronize" => cuEventSynchronize(behind),
            "cuEventSynchronize with a fence" => cuEventSynchronize(fenced),
            "cuEventQuery" => poll(|| cuEventQuery(behind)),
            "cuEventQuery with a fence" => poll(|| cuEventQuery(fenced)),
            "cuEventElapsedTime" => cuEventElapsedTime_v2(&raw mut milliseconds, before, behind),
            "cuMemcpyDtoH of ordinary memory" => cuMemcpyDtoH_v2(ordinary, memory, 64),
            "cuMemcpyDtoH of pinned memory" => cuMemcpyDtoH_v2(pinned, memory, 64),
            "cuMemcpyHtoD of pinned memory" => cuMemcpyHtoD_v2(memory, pinned, 64),
            "cuMemcpyHtoD of ordinary memory" => cuMemcpyHtoD_v2(memory, ordinary, 64),
            "cuMemFree" => cuMemFree_v2(memory),
            "cuMemFreeHost" => cuMemFreeHost(pinned),
            // A smaller allocation is a part of a slab, and does not wait.
            "cuMemAlloc" => cuMemAlloc_v2(&raw mut address, 4 << 20),
            "cuMemGetInfo" => cuMemGetInfo_v2(&raw mut word, &raw mut other),
            "cuCtxGetLimit" => cuCtxGetLimit(&raw mut word, 0),
            "cuModuleUnload" => cuModuleUnload(module),
            // The instantiation and the launch do not wait, so they may succeed or return the error.
            "cuGraphInstantiate and a wait" => {
                match cuGraphInstantiateWithFlags(&raw mut made, graph, 0) {
                    0 => cuStreamSynchronize(stream),
                    error => error,
                }
            }
            "cuGraphLaunch and a wait" => match cuGraphLaunch(executable, stream) {
                0 => cuStreamSynchronize(stream),
                error => error,
            },
            _ => unreachable!("{name}"),
        }
    }
}

#[test]
fn no_call_succeeds_that_waited_while_the_context_died() {
    for prints in [false, true] {
        for name in CALLS {
            in_process(move || {
                let ready = ready(prints);
                let fails = &ready.backend.shared.fails_launches;
                fails.store(ILLEGAL_ADDRESS, Ordering::Release);
                // SAFETY: all objects are alive. The context dies at the first call that waits, so `call` begins with a
                // live one.
                let recorded = unsafe {
                    [
                        launch(ready.function, ready.stream),
                        cuEventRecord(ready.behind, ready.stream),
                        cuEventRecord(ready.fenced, ready.stream),
                    ]
                };
                assert_eq!(recorded, [0; 3]);
                assert_eq!(
                    call(name, &ready),
                    ILLEGAL_ADDRESS,
                    "{name}, prints: {prints}"
                );
                // SAFETY: plain call.
                let again = unsafe { cuCtxSynchronize() };
                assert_eq!(again, ILLEGAL_ADDRESS, "{name}");
            });
        }
    }
}
