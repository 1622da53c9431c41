//! Messages that each call sends, and results of calls when the backend fails.

mod support;

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use cuda as _;
use support::{Backend, DEVICE_BYTES, WINDOW_BYTES, in_process};
use wormhole_api::CuResult;
use wormhole_api::ctypes::CUDA_KERNEL_NODE_PARAMS_v1;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDeviceGetCount(count: *mut i32) -> u32;
    fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: i32) -> u32;
    fn cuCtxSetCurrent(context: *mut c_void) -> u32;
    fn cuCtxSynchronize() -> u32;
    fn cuCtxGetCurrent(context: *mut *mut c_void) -> u32;
    fn cuStreamCreate(stream: *mut *mut c_void, flags: u32) -> u32;
    fn cuStreamDestroy_v2(stream: *mut c_void) -> u32;
    fn cuStreamSynchronize(stream: *mut c_void) -> u32;
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> u32;
    fn cuModuleGetFunction(
        function: *mut *mut c_void,
        module: *mut c_void,
        name: *const c_char,
    ) -> u32;
    fn cuLaunchKernel(
        function: *mut c_void,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: *mut c_void,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> u32;
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: u32) -> u32;
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> u32;
    fn cuGraphInstantiateWithFlags(
        executable: *mut *mut c_void,
        graph: *mut c_void,
        flags: u64,
    ) -> u32;
    fn cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) -> u32;
    fn cuGraphExecDestroy(executable: *mut c_void) -> u32;
    fn cuGraphGetNodes(graph: *mut c_void, nodes: *mut *mut c_void, count: *mut usize) -> u32;
    fn cuGraphExecKernelNodeSetParams(
        executable: *mut c_void,
        node: *mut c_void,
        parameters: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> u32;
    fn cuGraphDestroy(graph: *mut c_void) -> u32;
    fn cuDevicePrimaryCtxReset_v2(device: i32) -> u32;
    fn cuLibraryLoadData(
        library: *mut *mut c_void,
        code: *const c_void,
        options: *const u32,
        values: *mut *mut c_void,
        count: u32,
        library_options: *const u32,
        library_values: *mut *mut c_void,
        library_count: u32,
    ) -> u32;
    fn cuLibraryGetKernel(
        kernel: *mut *mut c_void,
        library: *mut c_void,
        name: *const c_char,
    ) -> u32;
    fn cuEventCreate(event: *mut *mut c_void, flags: u32) -> u32;
    fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> u32;
    fn cuEventQuery(event: *mut c_void) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemFree_v2(address: u64) -> u32;
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: *mut c_void) -> u32;
    fn cuMemFreeAsync(address: u64, stream: *mut c_void) -> u32;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    fn cuIpcGetMemHandle(handle: *mut c_void, address: u64) -> u32;
    fn cuMemcpyHtoD_v2(destination: u64, source: *const c_void, bytes: usize) -> u32;
    fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: u32) -> u32;
    fn cuMemFreeHost(pointer: *mut c_void) -> u32;
    fn cuMemcpy(destination: u64, source: u64, bytes: usize) -> u32;
    fn cuLinkCreate_v2(
        count: u32,
        options: *const u32,
        values: *mut *mut c_void,
        state: *mut *mut c_void,
    ) -> u32;
    fn cuLinkAddData_v2(
        state: *mut c_void,
        kind: u32,
        data: *const c_void,
        bytes: usize,
        name: *const c_char,
        count: u32,
        options: *const u32,
        values: *mut *mut c_void,
    ) -> u32;
    fn cuLinkComplete(state: *mut c_void, image: *mut *mut c_void, bytes: *mut usize) -> u32;
    fn cuLinkDestroy(state: *mut c_void) -> u32;
    fn cuMemcpyDtoH_v2(destination: *mut c_void, source: u64, bytes: usize) -> u32;
}

/// Process with a context, a stream, and a kernel with one parameter.
struct Ready {
    backend: Backend,
    stream: *mut c_void,
    function: *mut c_void,
}

fn ready() -> Ready {
    ready_with(Backend::start())
}

fn ready_with(backend: Backend) -> Ready {
    let [mut context, mut stream, mut module, mut function] = [null_mut(); 4];
    // SAFETY: every place is writable, and the image is text that ends.
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
        assert_eq!(
            cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
            0
        );
        assert_eq!(
            cuModuleGetFunction(&raw mut function, module, c"kernel".as_ptr()),
            0
        );
    }
    assert_eq!(
        backend.shared.take(),
        [
            "DeviceDescribe?",
            "StreamCreate",
            "ModuleLoad?",
            "ModuleGetFunction?"
        ]
    );
    Ready {
        backend,
        stream,
        function,
    }
}

impl Ready {
    fn launch(&self, block: u32) -> u32 {
        launch(self.function, self.stream, block)
    }

    fn synchronize(&self) -> u32 {
        // SAFETY: a live stream.
        unsafe { cuStreamSynchronize(self.stream) }
    }
}

fn launch(function: *mut c_void, stream: *mut c_void, block: u32) -> u32 {
    let mut value = 7_u32;
    let mut parameters = [(&raw mut value).cast()];
    // SAFETY: the kernel has one parameter of four bytes.
    unsafe {
        cuLaunchKernel(
            function,
            1,
            1,
            1,
            block,
            1,
            1,
            0,
            stream,
            parameters.as_mut_ptr(),
            null_mut(),
        )
    }
}

#[test]
fn a_capture_ends_with_the_thread_whose_stream_it_began_in() {
    in_process(|| {
        let ready = ready();
        let mut context = null_mut();
        // SAFETY: a writable place.
        assert_eq!(unsafe { cuCtxGetCurrent(&raw mut context) }, 0);
        let context = AtomicPtr::new(context);
        let begun = std::thread::spawn(move || {
            let per_thread = std::ptr::without_provenance_mut(2);
            // SAFETY: a live context, and the thread's own stream.
            unsafe {
                assert_eq!(cuCtxSetCurrent(context.load(Ordering::Relaxed)), 0);
                assert_eq!(cuStreamBeginCapture_v2(per_thread, 0), 0);
                let mut address = 0;
                cuMemAlloc_v2(&raw mut address, 64)
            }
        });
        assert_eq!(begun.join().unwrap(), 900);
        let mut address = 0;
        // SAFETY: a writable place.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut address, 64) }, 0);
        assert_eq!(ready.synchronize(), 0);
    });
}

#[test]
fn nodes_that_are_set_are_sent_together_before_the_next_launch() {
    in_process(|| {
        let ready = ready();
        let [mut graph, mut executable] = [null_mut(); 2];
        let mut nodes = [null_mut(); 2];
        let mut count = nodes.len();
        let mut value = 5_u64;
        let mut values = [(&raw mut value).cast()];
        let parameters = CUDA_KERNEL_NODE_PARAMS_v1 {
            func: ready.function.cast(),
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 7,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: values.as_mut_ptr(),
            extra: null_mut(),
        };
        // SAFETY: a live stream, places that are writable, and parameters that fit the kernel.
        unsafe {
            assert_eq!(cuStreamBeginCapture_v2(ready.stream, 0), 0);
            assert_eq!([ready.launch(1), ready.launch(2)], [0; 2]);
            assert_eq!(cuStreamEndCapture(ready.stream, &raw mut graph), 0);
            assert_eq!(
                cuGraphInstantiateWithFlags(&raw mut executable, graph, 0),
                0
            );
            assert_eq!(
                cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count),
                0
            );
            drop(ready.backend.shared.take());
            for node in nodes {
                let set = cuGraphExecKernelNodeSetParams(executable, node, &raw const parameters);
                assert_eq!(set, 0);
            }
            assert_eq!(ready.backend.shared.take(), [""; 0]);
            assert_eq!(cuGraphLaunch(executable, ready.stream), 0);
            assert_eq!(cuGraphLaunch(executable, ready.stream), 0);
        }
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            [
                "GraphBegin",
                "GraphKernel",
                "GraphKernel",
                "GraphEdges",
                "GraphUpdate?",
                "GraphLaunch",
                "GraphLaunch",
                "FenceWrite"
            ]
        );
    });
}

#[test]
fn captured_work_is_not_sent_and_its_graph_is_launched_by_one_record() {
    in_process(|| {
        let ready = ready();
        let [mut graph, mut executable] = [null_mut(); 2];
        // SAFETY: a live stream, and places that are writable.
        unsafe {
            assert_eq!(cuStreamBeginCapture_v2(ready.stream, 0), 0);
            assert_eq!([ready.launch(1), ready.launch(2)], [0; 2]);
            assert_eq!(cuStreamEndCapture(ready.stream, &raw mut graph), 0);
            assert_eq!(ready.backend.shared.take(), [""; 0]);
            assert_eq!(
                cuGraphInstantiateWithFlags(&raw mut executable, graph, 0),
                0
            );
            assert_eq!(
                ready.backend.shared.take(),
                [
                    "GraphBegin",
                    "GraphKernel",
                    "GraphKernel",
                    "GraphEdges",
                    "GraphInstantiate?"
                ]
            );
            assert_eq!(cuGraphDestroy(graph), 0);
            for _ in 0..3 {
                assert_eq!(cuGraphLaunch(executable, ready.stream), 0);
            }
            assert_eq!(cuGraphExecDestroy(executable), 0);
            assert_eq!(cuGraphLaunch(executable, ready.stream), 1);
        }
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            [
                "GraphLaunch",
                "GraphLaunch",
                "GraphLaunch",
                "GraphDestroy",
                "FenceWrite"
            ]
        );
    });
}

#[test]
fn questions_are_answered_without_the_backend() {
    in_process(|| {
        let ready = ready();
        let (mut count, mut value, mut context) = (0, 0, null_mut());
        // SAFETY: every place is writable.
        unsafe {
            assert_eq!(cuDeviceGetCount(&raw mut count), 0);
            assert_eq!(cuDeviceGetAttribute(&raw mut value, 1, 0), 0);
            assert_eq!(cuCtxGetCurrent(&raw mut context), 0);
            assert_eq!(cuDeviceGetAttribute(&raw mut value, 1, 5), 101);
        }
        assert_eq!((count, value), (1, 1024));
        assert!(!context.is_null());
        assert_eq!(ready.launch(1025), 1);
        assert_eq!(ready.launch(257), 701);
        assert_eq!(ready.backend.shared.take(), [""; 0]);
        assert_eq!(ready.synchronize(), 0);
        assert!(ready.backend.local_calls() >= 4);
    });
}

#[test]
fn a_kernel_is_a_request_once_and_a_record_from_then_on() {
    in_process(|| {
        let ready = ready();
        for _ in 0..3 {
            assert_eq!(ready.launch(32), 0);
        }
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            [
                "LaunchKernel?",
                "LaunchKernel",
                "LaunchKernel",
                "FenceWrite"
            ]
        );
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            [""; 0],
            "a stream without new work is not asked again"
        );
    });
}

#[test]
fn the_legacy_stream_completes_the_blocking_ones() {
    in_process(|| {
        let mut ready = ready();
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuStreamCreate(&raw mut ready.stream, 0) }, 0);
        assert_eq!(ready.launch(32), 0);
        ready.backend.shared.take();
        // SAFETY: the legacy stream is always there.
        let synchronize_legacy = || assert_eq!(unsafe { cuStreamSynchronize(null_mut()) }, 0);
        synchronize_legacy();
        assert_eq!(ready.backend.shared.take(), ["FenceWrite"]);
        synchronize_legacy();
        assert_eq!(ready.synchronize(), 0);
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { cuCtxSynchronize() }, 0);
        assert_eq!(ready.backend.shared.take(), [""; 0]);
    });
}

#[test]
fn a_library_is_loaded_again_after_a_reset_when_its_kernel_is_used() {
    in_process(|| {
        let mut ready = ready();
        let (mut library, mut context) = (null_mut(), null_mut());
        // SAFETY: every place is writable, and the image is text that ends.
        unsafe {
            let code = c".version 8.0".as_ptr().cast();
            let (no_keys, no_values) = (std::ptr::null(), null_mut());
            let loaded = cuLibraryLoadData(
                &raw mut library,
                code,
                no_keys,
                no_values,
                0,
                no_keys,
                no_values,
                0,
            );
            assert_eq!(loaded, 0);
            let mut kernel = null_mut();
            assert_eq!(
                cuLibraryGetKernel(&raw mut kernel, library, c"kernel".as_ptr()),
                0
            );
            assert_eq!(cuDevicePrimaryCtxReset_v2(0), 0);
            assert_eq!(cuCtxSynchronize(), 709);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(
                ready.launch(32),
                400,
                "modules and streams went with the context"
            );
            ready.function = kernel;
            ready.stream = null_mut();
        }
        ready.backend.shared.take();
        assert_eq!(ready.launch(32), 0);
        assert_eq!(ready.launch(32), 0);
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            [
                "LibraryLoad?",
                "LibraryGetKernel?",
                "LaunchKernel?",
                "LaunchKernel",
                "FenceWrite"
            ]
        );
    });
}

#[test]
fn a_link_sends_what_was_added_and_keeps_its_image() {
    in_process(|| {
        let ready = ready();
        let add = |state, kind, data: &[u8]| {
            let (data, bytes) = (data.as_ptr().cast(), data.len());
            let (name, options) = (std::ptr::null(), std::ptr::null());
            // SAFETY: the data is readable, and there are no options.
            unsafe { cuLinkAddData_v2(state, kind, data, bytes, name, 0, options, null_mut()) }
        };
        let (first, second) = ([b'a'; 20_000], [b'b'; 10_000]);
        let (mut state, mut image, mut bytes) = (null_mut(), null_mut(), 0_usize);
        let mut log = [b'x'; 16];
        let (keys, mut values) = ([5, 6], [log.as_mut_ptr().cast(), 16 as *mut c_void]);
        // SAFETY: every place is writable, and the option's buffer outlives the link.
        unsafe {
            let (keys, values) = (keys.as_ptr(), values.as_mut_ptr());
            assert_eq!(cuLinkCreate_v2(2, keys, values, &raw mut state), 0);
            assert_eq!(add(state, 1, &first), 0);
            assert_eq!(add(state, 1, &second), 0);
            assert_eq!(add(state, 6, &second), 1, "no such type");
            assert_eq!(add(state, 1, &[]), 1, "nothing");
            assert_eq!(cuLinkComplete(state, &raw mut image, &raw mut bytes), 0);
            let image = std::slice::from_raw_parts(image.cast::<u8>(), bytes);
            let inputs = [b"<input 0>", &first[..], b"<input 1>", &second].concat();
            assert!(image == inputs.repeat(8), "{} bytes", image.len());
            assert_eq!(log[0], 0, "there is nothing to tell");
            assert_eq!(add(state, 1, &first), 1, "it is complete");
            assert_eq!(cuLinkDestroy(state), 0);
            assert_eq!(cuLinkDestroy(state), 400);
        }
        // Four requests: one check for each added input, and a link repeated because the image did not fit.
        assert_eq!(ready.backend.shared.take(), ["Link?"; 4]);
    });
}

#[test]
fn launches_are_held_back_before_the_driver_would_block() {
    in_process(|| {
        let ready = ready();
        for _ in 0..2000 {
            assert_eq!(ready.launch(32), 0);
        }
        assert_eq!(ready.synchronize(), 0);
        let log = ready.backend.shared.take();
        let fences: Vec<usize> = (0..log.len())
            .filter(|index| log[*index] == "FenceWrite")
            .collect();
        assert!(
            fences.windows(2).all(|pair| pair[1] - pair[0] <= 257),
            "{fences:?}"
        );
        assert!(fences.len() >= 7);
    });
}

#[test]
fn threads_that_share_a_stream_are_held_back_together() {
    const THREADS: u64 = 6;
    const EACH: u64 = 1000;
    in_process(|| {
        let ready = ready();
        let shared = &ready.backend.shared;
        assert_eq!(ready.launch(32), 0);
        assert_eq!(ready.synchronize(), 0);
        shared.lags.store(true, Ordering::Release);
        let mut context = null_mut();
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuCtxGetCurrent(&raw mut context) }, 0);
        let handles = [ready.function, ready.stream, context].map(<*mut c_void>::addr);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(move || {
                    let [function, stream, context] = handles.map(std::ptr::without_provenance_mut);
                    // SAFETY: a live context.
                    assert_eq!(unsafe { cuCtxSetCurrent(context) }, 0);
                    for _ in 0..EACH {
                        assert_eq!(launch(function, stream, 32), 0);
                    }
                });
            }
        });
        assert_eq!(ready.synchronize(), 0);
        let launches = shared.take();
        let launches = launches.iter().filter(|name| *name == "LaunchKernel");
        assert_eq!(launches.count() as u64, THREADS * EACH);
        let most = shared.most_launches.load(Ordering::Acquire);
        assert!((513..=768 + THREADS).contains(&most), "{most}");
    });
}

#[test]
fn an_event_gets_fences_once_it_has_been_queried() {
    in_process(|| {
        let ready = ready();
        let mut event = null_mut();
        // SAFETY: the place is writable, the handles are live.
        unsafe {
            assert_eq!(cuEventCreate(&raw mut event, 2), 0);
            assert_eq!(cuEventQuery(event), 0);
            assert_eq!(cuEventRecord(event, ready.stream), 0);
            assert_eq!(cuEventRecord(event, ready.stream), 0);
        }
        assert_eq!(ready.synchronize(), 0);
        assert_eq!(
            ready.backend.shared.take(),
            ["EventCreate", "EventRecord", "EventRecord", "FenceWrite"]
        );
        // SAFETY: as above.
        unsafe {
            assert_eq!(cuEventQuery(event), 0, "its fence was written");
            assert_eq!(cuEventQuery(event.byte_add(1 << 18)), 400);
        }
        assert_eq!(ready.backend.shared.take(), [""; 0]);
    });
}

#[test]
fn copies_of_ordinary_memory_arrive_whole() {
    in_process(|| {
        let ready = ready();
        let mut device = 0;
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut device, DEVICE_BYTES) }, 0);
        let source: Vec<u8> = (0..3_000_001_u32)
            .map(|index| index.wrapping_mul(2_654_435_761).to_le_bytes()[3])
            .collect();
        for bytes in [1, 4096, 4097, 512 << 10, (512 << 10) + 1, source.len()] {
            let mut destination = vec![0; bytes];
            // SAFETY: both host ranges are that long, and so is the device's.
            unsafe {
                assert_eq!(
                    cuMemcpyHtoD_v2(device + 3, source.as_ptr().cast(), bytes),
                    0
                );
                assert_eq!(
                    cuMemcpyDtoH_v2(destination.as_mut_ptr().cast(), device + 3, bytes),
                    0
                );
            }
            assert!(destination == source[..bytes], "{bytes} bytes");
        }
        let end = device + DEVICE_BYTES as u64;
        // SAFETY: refused before anything is read.
        unsafe {
            assert_eq!(cuMemcpyHtoD_v2(end - 1, source.as_ptr().cast(), 2), 1);
            assert_eq!(cuMemcpyHtoD_v2(0x1234, source.as_ptr().cast(), 2), 1);
        }
        drop(ready);
    });
}

#[test]
fn a_fault_ends_a_wait_and_every_call_after_it() {
    in_process(|| {
        let ready = ready();
        ready
            .backend
            .shared
            .holds_fences
            .store(true, Ordering::Release);
        assert_eq!(ready.launch(32), 0);
        std::thread::scope(|scope| {
            let backend = &ready.backend;
            scope.spawn(move || {
                while !backend.shared.take().contains(&"FenceWrite".to_owned()) {
                    std::thread::yield_now();
                }
                backend.fail(CuResult::ILLEGAL_ADDRESS);
            });
            assert_eq!(ready.synchronize(), 700);
        });
        assert_eq!(ready.synchronize(), 700);
        assert_eq!(ready.launch(32), 700);
    });
}

#[test]
fn a_backend_that_goes_away_ends_a_wait() {
    in_process(|| {
        let ready = ready();
        ready
            .backend
            .shared
            .holds_fences
            .store(true, Ordering::Release);
        assert_eq!(ready.launch(32), 0);
        std::thread::scope(|scope| {
            let backend = &ready.backend;
            scope.spawn(move || {
                while !backend.shared.take().contains(&"FenceWrite".to_owned()) {
                    std::thread::yield_now();
                }
                backend.disappear();
            });
            assert_eq!(ready.synchronize(), 802);
        });
        assert_eq!(ready.launch(32), 802);
    });
}

#[test]
fn a_backend_that_goes_away_ends_calls_that_wait_for_nothing() {
    in_process(|| {
        let ready = ready();
        assert_eq!(ready.launch(32), 0);
        assert_eq!(ready.synchronize(), 0);
        ready.backend.disappear();
        // Without new work a synchronize does not wait, and succeeds until the end is noticed.
        let deadline = Instant::now() + Duration::from_secs(60);
        while ready.synchronize() == 0 {
            assert!(Instant::now() < deadline, "nobody notices the end");
            std::thread::yield_now();
        }
        assert_eq!(ready.synchronize(), 802);
        assert_eq!(ready.launch(32), 802);
    });
}

#[test]
fn the_watching_thread_takes_no_signals() {
    in_process(|| {
        let _ready = ready();
        // A new thread sets its name only when it runs.
        let deadline = Instant::now() + Duration::from_secs(60);
        let watcher = loop {
            let found = std::fs::read_dir("/proc/self/task")
                .unwrap()
                .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
                .find(|status| status.starts_with("Name:\twormhole-watch\n"));
            if let Some(found) = found {
                break found;
            }
            assert!(Instant::now() < deadline, "no thread watches");
            std::thread::yield_now();
        };
        let mask = watcher
            .lines()
            .find_map(|line| line.strip_prefix("SigBlk:\t"))
            .unwrap();
        let mask = u64::from_str_radix(mask, 16).unwrap();
        let program = [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGPROF];
        assert!(program.iter().all(|signal| mask & 1 << (signal - 1) != 0));
    });
}

#[test]
fn a_forked_child_is_not_initialised() {
    in_process(|| {
        let ready = ready();
        in_process(|| {
            let (mut count, mut context) = (0, null_mut());
            // SAFETY: every place is writable.
            unsafe {
                assert_eq!(cuInit(0), 3);
                assert_eq!(cuDeviceGetCount(&raw mut count), 3);
                assert_eq!(cuCtxGetCurrent(&raw mut context), 3);
            }
        });
        assert_eq!(ready.launch(32), 0);
    });
}

#[test]
fn small_allocations_need_no_answer_but_one_for_each_slab() {
    in_process(|| {
        let ready = ready();
        let mut parts = [0; 3];
        // SAFETY: every place is writable.
        unsafe {
            for part in &mut parts {
                assert_eq!(cuMemAlloc_v2(part, 1000), 0);
            }
            assert_eq!(parts.map(|part| part - parts[0]), [0, 1024, 2048]);
            for part in parts {
                assert_eq!(cuMemFree_v2(part), 0);
                assert_eq!(cuMemFree_v2(part), 1);
            }
            let mut again = 0;
            assert_eq!(cuMemAlloc_v2(&raw mut again, 1), 0);
            assert_eq!(again, parts[0]);
            // The answer comes after what was sent before.
            assert_eq!(cuMemAlloc_v2(&raw mut again, 4 << 20), 0);
        }
        let mut sent = vec!["SlabAlloc?"];
        sent.extend(["PartAlloc"; 3]);
        sent.extend(["PartFree"; 3]);
        sent.extend(["PartAlloc", "MemAlloc?"]);
        assert_eq!(ready.backend.shared.take(), sent);
    });
}

#[test]
fn a_stream_allocates_what_it_freed_without_a_message() {
    in_process(|| {
        let ready = ready();
        let (mut first, mut again) = (0, 0);
        // SAFETY: the places are writable and the stream is live.
        unsafe {
            assert_eq!(cuMemAllocAsync(&raw mut first, 4096, ready.stream), 0);
            for _ in 0..3 {
                assert_eq!(cuMemFreeAsync(first, ready.stream), 0);
                assert_eq!(cuMemFreeAsync(first, ready.stream), 1, "freed already");
                assert_eq!(cuMemAllocAsync(&raw mut again, 4096, ready.stream), 0);
                assert_eq!(again, first);
            }
            assert_eq!(cuMemFreeAsync(first, ready.stream), 0);
            // Neither another size nor a wait gives it to the pool.
            assert_eq!(cuMemAllocAsync(&raw mut again, 8192, ready.stream), 0);
            assert_eq!(cuMemFreeAsync(again, ready.stream), 0);
            assert_eq!(cuStreamSynchronize(ready.stream), 0);
            assert_eq!(cuMemAllocAsync(&raw mut again, 4096, ready.stream), 0);
            assert_eq!(again, first);
            assert_eq!(cuMemFreeAsync(again, ready.stream), 0);
            // Much memory: the pool gets it before a wait and before another size.
            assert_eq!(cuMemAllocAsync(&raw mut again, 40 * MIB, ready.stream), 0);
            assert_eq!(cuMemFreeAsync(again, ready.stream), 0);
            assert_eq!(cuStreamSynchronize(ready.stream), 0);
            assert_eq!(cuMemAllocAsync(&raw mut again, 40 * MIB, ready.stream), 0);
            assert_eq!(cuMemFreeAsync(again, ready.stream), 0);
            assert_eq!(cuMemAllocAsync(&raw mut again, 4096, ready.stream), 0);
            assert_eq!(cuMemFreeAsync(again, ready.stream), 0);
            assert_eq!(cuStreamDestroy_v2(ready.stream), 0);
            // The answer comes after what was sent before.
            assert_eq!(cuMemAlloc_v2(&raw mut again, 4 * MIB), 0);
        }
        let sent = [
            "PoolDefault?",
            "PoolAlloc?",
            "PoolAlloc?",
            "PoolAlloc?",
            "PoolFree",
            "PoolFree",
            "PoolFree",
            "Synchronize?",
            "PoolAlloc?",
            "PoolFree",
            "PoolAlloc?",
            "PoolFree",
            "StreamDestroy",
            "MemAlloc?",
        ];
        assert_eq!(ready.backend.shared.take(), sent);
    });
}

#[test]
fn what_a_program_frees_is_allocated_again_without_a_message() {
    in_process(|| {
        let ready = ready();
        let (mut first, mut again, mut free) = (0, 0, 0_usize);
        // SAFETY: the places are writable and the stream is live.
        unsafe {
            assert_eq!(cuMemAlloc_v2(&raw mut first, 20 * MIB), 0);
            for _ in 0..3 {
                assert_eq!(cuMemFree_v2(first), 0);
                assert_eq!(cuMemFree_v2(first), 1, "freed already");
                assert_eq!(cuMemAlloc_v2(&raw mut again, 20 * MIB), 0);
                assert_eq!(again, first);
            }
            assert_eq!(cuMemFree_v2(first), 0);
            // Another size, and more than is kept: the worker frees the first allocation.
            assert_eq!(cuMemAlloc_v2(&raw mut again, 16 * MIB), 0);
            assert_eq!(cuMemFree_v2(again), 0);
            // The program is told that both are free, as is what a stream has freed.
            assert_eq!(cuMemAllocAsync(&raw mut first, 4096, ready.stream), 0);
            assert_eq!(cuMemFreeAsync(first, ready.stream), 0);
            assert_eq!(cuMemGetInfo_v2(&raw mut free, null_mut()), 0);
            // Too large to be kept.
            assert_eq!(cuMemAlloc_v2(&raw mut again, 40 * MIB), 0);
            assert_eq!(cuMemFree_v2(again), 0);
        }
        let sent = [
            "MemAlloc?",
            "MemAlloc?",
            "MemFree?",
            "PoolDefault?",
            "PoolAlloc?",
            "MemFree?",
            "PoolFree",
            "Synchronize?",
            "MemGetInfo?",
            "MemAlloc?",
            "MemFree?",
        ];
        assert_eq!(ready.backend.shared.take(), sent);
    });
}

#[test]
fn memory_that_another_process_may_have_open_is_freed_at_once() {
    in_process(|| {
        let ready = ready();
        let mut memory = 0;
        let mut handle = [0_u8; 64];
        // SAFETY: the places are writable, and a handle has 64 bytes.
        unsafe {
            assert_eq!(cuMemAlloc_v2(&raw mut memory, 20 * MIB), 0);
            assert_eq!(cuIpcGetMemHandle(handle.as_mut_ptr().cast(), memory), 0);
            assert_eq!(cuMemFree_v2(memory), 0);
        }
        let sent = ["MemAlloc?", "ShareAddress?", "MemFree?"];
        assert_eq!(ready.backend.shared.take(), sent);
    });
}

#[test]
fn a_destroyed_stream_is_an_invalid_handle() {
    in_process(|| {
        let ready = ready();
        // SAFETY: the stream is live in the first call; the others pass its stale handle, which is refused.
        unsafe {
            assert_eq!(cuStreamDestroy_v2(ready.stream), 0);
            assert_eq!(cuStreamDestroy_v2(ready.stream), 400);
            assert_eq!(cuStreamSynchronize(ready.stream), 400);
        }
        assert_eq!(ready.launch(32), 400);
        let mut device = 0;
        // SAFETY: the place is writable. The answer comes after what was sent before.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut device, 4 << 20) }, 0);
        assert_eq!(ready.backend.shared.take(), ["StreamDestroy", "MemAlloc?"]);
    });
}

#[test]
fn without_a_backend_there_is_no_device() {
    in_process(|| {
        // SAFETY: nothing else in this process reads or writes the environment.
        unsafe { std::env::set_var("WORMHOLE_CONTROL", "nowhere") };
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { cuInit(0) }, 100);
        // SAFETY: as above.
        unsafe { std::env::set_var("WORMHOLE_CONTROL", "unix:/nonexistent") };
        // SAFETY: as above.
        assert_eq!(unsafe { cuInit(0) }, 802);
    });
}

const MIB: usize = 1 << 20;

fn allocate_host(bytes: usize) -> *mut c_void {
    let mut pointer = null_mut();
    // SAFETY: the place is writable.
    assert_eq!(unsafe { cuMemHostAlloc(&raw mut pointer, bytes, 0) }, 0);
    pointer
}

fn free_host(pointer: *mut c_void) {
    // SAFETY: the memory was allocated and is not used any more.
    assert_eq!(unsafe { cuMemFreeHost(pointer) }, 0);
}

/// Returns whether the byte at an address is readable, by a write(2) from it.
fn is_mapped(address: *const c_void) -> bool {
    let mut ends = [0; 2];
    // SAFETY: the place has room for two descriptors; the kernel checks the address.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        let written = libc::write(ends[1], address, 1);
        assert!(ends.iter().all(|end| libc::close(*end) == 0));
        written == 1
    }
}

#[test]
fn arena_that_is_empty_goes_back_but_for_one_extent() {
    in_process(|| {
        let ready = ready();
        let shared = &ready.backend.shared;
        let (small, large) = (allocate_host(12 * MIB), allocate_host(20 * MIB));
        assert_eq!(shared.arena(2), ["ask 6", "ask 10"]);
        free_host(small);
        assert!(is_mapped(small));
        free_host(large);
        assert_eq!(shared.arena(3)[2..], ["return 6"]);
        assert!(!is_mapped(small) && is_mapped(large));
        for _ in 0..100 {
            free_host(allocate_host(20 * MIB));
        }
        assert_eq!(shared.arena(3).len(), 3, "a loop keeps its extent");
        // Each round allocates most of the window, so the memory of the round before must have been returned.
        for round in 1..10 {
            let pointers = [(); 5].map(|()| allocate_host(20 * MIB));
            pointers.into_iter().for_each(free_host);
            // Four new extents are requested, and four of five are returned.
            assert_eq!(shared.arena(3 + 8 * round).len(), 3 + 8 * round);
        }
    });
}

#[test]
fn small_allocations_make_the_arena_grow_by_what_it_has() {
    in_process(|| {
        let ready = ready();
        let shared = &ready.backend.shared;
        let pointers: Vec<_> = (0..16).map(|_| allocate_host(MIB)).collect();
        assert_eq!(shared.arena(4), ["ask 1", "ask 1", "ask 2", "ask 4"]);
        pointers.into_iter().for_each(free_host);
    });
}

#[test]
fn copies_and_loads_work_when_pinned_memory_has_filled_the_window() {
    in_process(|| {
        let _ready = ready();
        let mut pinned = 0;
        // SAFETY: the place is writable, and the memory is not used.
        while unsafe { cuMemHostAlloc(&mut null_mut(), 2 * MIB, 0) } == 0 {
            pinned += 1;
        }
        // Programs cannot allocate the bootstrap segment, the session segment and the reserve.
        assert_eq!(pinned, WINDOW_BYTES / (2 * MIB) - 3);
        let data: Vec<u8> = (0..=250).cycle().take(3 * MIB + 5).collect();
        let mut back = vec![0_u8; data.len()];
        let (mut memory, mut module) = (0, null_mut());
        // SAFETY: every place is writable, both buffers are that long, and the image is text that ends.
        unsafe {
            assert_eq!(cuMemAlloc_v2(&raw mut memory, data.len()), 0);
            let length = data.len();
            assert_eq!(cuMemcpyHtoD_v2(memory, data.as_ptr().cast(), length), 0);
            assert_eq!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), memory, length), 0);
            assert_eq!(
                cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
                0
            );
        }
        assert!(back == data);
    });
}

#[test]
fn a_forked_child_has_no_arena_that_could_become_another_session_s() {
    /// Pinned memory of the parent, as an address in its child.
    static PINNED: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
    fn pin() {
        let small = allocate_host(4096);
        PINNED.store(small, Ordering::Relaxed);
        assert!(is_mapped(small));
    }
    in_process(|| {
        let _ready = ready_with(Backend::start_in_vm());
        pin();
        in_process(|| assert!(!is_mapped(PINNED.load(Ordering::Relaxed))));
        // Arena that was granted later is unmapped too.
        PINNED.store(allocate_host(20 * MIB), Ordering::Relaxed);
        in_process(|| assert!(!is_mapped(PINNED.load(Ordering::Relaxed))));
    });
    in_process(|| {
        // A process beside the backend receives a file of its own session only, so its child keeps the mapping.
        let _ready = ready();
        pin();
        in_process(|| assert!(is_mapped(PINNED.load(Ordering::Relaxed))));
    });
}

#[test]
fn more_arena_than_the_window_has_is_not_waited_for() {
    in_process(|| {
        let ready = ready();
        let shared = &ready.backend.shared;
        let pointers = [(); 2].map(|()| allocate_host(20 * MIB));
        pointers.into_iter().for_each(free_host);
        let before = ["ask 10", "ask 10", "return 10"];
        assert_eq!(shared.arena(3), before);
        let mut pointer = null_mut();
        // SAFETY: the place is writable.
        let result = unsafe { cuMemHostAlloc(&raw mut pointer, WINDOW_BYTES + 1, 0) };
        assert_eq!(result, 2);
        assert_eq!(shared.arena(3), before);
    });
}

#[test]
fn a_fault_ends_an_allocation_that_nobody_answers() {
    in_process(|| {
        let ready = ready();
        let shared = &ready.backend.shared;
        shared.holds_arena.store(true, Ordering::Release);
        let mut context = null_mut();
        // SAFETY: the place is writable.
        assert_eq!(unsafe { cuCtxGetCurrent(&raw mut context) }, 0);
        let context = context.addr();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut pointer = null_mut();
            // SAFETY: a live context, and the place is writable.
            let results = unsafe {
                [
                    cuCtxSetCurrent(std::ptr::without_provenance_mut(context)),
                    cuMemHostAlloc(&raw mut pointer, 20 * MIB, 0),
                ]
            };
            sender.send(results).unwrap();
        });
        assert_eq!(shared.arena(1), ["ask 10"]);
        ready.backend.fail(CuResult::ILLEGAL_ADDRESS);
        let results = receiver.recv_timeout(Duration::from_secs(60));
        assert_eq!(results, Ok([0, 700]));
    });
}

#[test]
fn copies_from_host_to_host_are_the_guest_s_own() {
    in_process(|| {
        let ready = ready();
        let (from, to) = (allocate_host(4096), allocate_host(4096));
        let mut own = vec![0_u8; 4096];
        let addresses =
            [from, to, own.as_mut_ptr().cast()].map(|pointer| pointer.expose_provenance() as u64);
        // SAFETY: all three are that long.
        unsafe {
            from.cast::<u8>().write_bytes(9, 4096);
            assert_eq!(cuMemcpy(addresses[1], addresses[0], 4096), 0);
            assert_eq!(cuMemcpy(addresses[2], addresses[1], 4096), 0);
        }
        assert!(own.iter().all(|byte| *byte == 9));
        assert_eq!(ready.backend.shared.take(), [""; 0]);
    });
}

#[test]
fn a_parameter_buffer_may_be_too_short_but_not_empty() {
    in_process(|| {
        let ready = ready();
        for (bytes, result) in [(0_usize, 1), (3, 0), (4, 0)] {
            let mut value = 7_u32;
            let mut bytes = bytes;
            let mut extra: [*mut c_void; 5] = [
                std::ptr::without_provenance_mut(1),
                (&raw mut value).cast(),
                std::ptr::without_provenance_mut(2),
                (&raw mut bytes).cast(),
                null_mut(),
            ];
            // SAFETY: the list is as documented.
            let launched = unsafe {
                cuLaunchKernel(
                    ready.function,
                    1,
                    1,
                    1,
                    32,
                    1,
                    1,
                    0,
                    ready.stream,
                    null_mut(),
                    extra.as_mut_ptr(),
                )
            };
            assert_eq!(launched, result, "{bytes} bytes");
        }
    });
}

#[test]
fn a_reset_does_not_bring_a_dead_context_back() {
    in_process(|| {
        let ready = ready();
        assert_eq!(ready.launch(32), 0);
        ready.backend.fail(CuResult::ILLEGAL_ADDRESS);
        let (mut context, mut device) = (null_mut(), 0);
        // SAFETY: every place is writable.
        unsafe {
            assert_eq!(cuMemAlloc_v2(&raw mut device, 16), 700);
            assert_eq!(cuDevicePrimaryCtxReset_v2(0), 0);
            assert_eq!(cuMemAlloc_v2(&raw mut device, 16), 709);
            assert_eq!(cuCtxSynchronize(), 709);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 700);
            assert_eq!(cuMemAlloc_v2(&raw mut device, 16), 709);
        }
    });
}
