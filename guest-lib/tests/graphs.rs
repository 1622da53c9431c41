//! Graphs: objects that the library may send to the backend, and stale handles, which it must refuse.

mod support;

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;

use cuda as _;
use support::calls::launch;
use support::{Backend, in_process};
use wormhole_api::CuResult;
use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::ctypes::CUDA_MEMSET_NODE_PARAMS;

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuEventCreate(event: *mut Pointer, flags: u32) -> u32;
    fn cuEventDestroy_v2(event: Pointer) -> u32;
    fn cuGraphCreate(graph: *mut Pointer, flags: u32) -> u32;
    fn cuGraphAddEventRecordNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
        event: Pointer,
    ) -> u32;
    fn cuGraphAddEventWaitNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
        event: Pointer,
    ) -> u32;
    fn cuGraphAddEmptyNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
    ) -> u32;
    fn cuGraphAddChildGraphNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
        child: Pointer,
    ) -> u32;
    fn cuGraphChildGraphNodeGetGraph(node: Pointer, graph: *mut Pointer) -> u32;
    fn cuGraphGetNodes(graph: Pointer, nodes: *mut Pointer, count: *mut usize) -> u32;
    fn cuGraphDestroyNode(node: Pointer) -> u32;
    fn cuGraphDestroy(graph: Pointer) -> u32;
    fn cuGraphExecDestroy(graph: Pointer) -> u32;
    fn cuGraphLaunch(graph: Pointer, stream: Pointer) -> u32;
    fn cuUserObjectCreate(
        object: *mut Pointer,
        data: Pointer,
        destroy: extern "C" fn(Pointer),
        count: u32,
        flags: u32,
    ) -> u32;
    fn cuUserObjectRetain(object: Pointer, count: u32) -> u32;
    fn cuUserObjectRelease(object: Pointer, count: u32) -> u32;
    fn cuGraphInstantiateWithFlags(made: *mut Pointer, graph: Pointer, flags: u64) -> u32;
    fn cuGraphAddMemsetNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
        fill: *const CUDA_MEMSET_NODE_PARAMS,
        context: Pointer,
    ) -> u32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> u32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> u32;
    fn cuLaunchCooperativeKernel(
        function: Pointer,
        wide: u32,
        high: u32,
        deep: u32,
        block_wide: u32,
        block_high: u32,
        block_deep: u32,
        shared: u32,
        stream: Pointer,
        parameters: *mut Pointer,
    ) -> u32;
    fn cuLaunchHostFunc(stream: Pointer, function: extern "C" fn(Pointer), data: Pointer) -> u32;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Pointer) -> u32;
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Pointer) -> u32;
    fn cuMemcpyDtoHAsync_v2(to: Pointer, from: u64, bytes: usize, stream: Pointer) -> u32;
    fn cuStreamCreateWithPriority(stream: *mut Pointer, flags: u32, priority: i32) -> u32;
    fn cuStreamBeginCapture_v2(stream: Pointer, mode: u32) -> u32;
    fn cuStreamEndCapture(stream: Pointer, graph: *mut Pointer) -> u32;
    fn cuStreamSynchronize(stream: Pointer) -> u32;
    fn cuStreamWriteValue32_v2(stream: Pointer, address: u64, value: u32, flags: u32) -> u32;
}

extern "C" fn nothing(_: Pointer) {}

/// Natively the handle of a destroyed object may crash the program.
#[test]
fn what_is_gone_is_refused_and_harms_nobody() {
    const INVALID_VALUE: u32 = CuResult::INVALID_VALUE.0;
    in_process(|| {
        let _backend = Backend::start();
        let mut context = null_mut();
        // SAFETY: every place is writable, every handle is one of the library's.
        unsafe {
            assert_eq!(cuInit(0), 0);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            let [
                mut graph,
                mut inner,
                mut node,
                mut child,
                mut made,
                mut object,
            ] = [null_mut(); 6];
            let mut count = 0;
            assert_eq!(cuGraphCreate(&raw mut graph, 0), 0);
            assert_eq!(cuGraphAddEmptyNode(&raw mut node, graph, null(), 0), 0);
            assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
            assert_eq!(cuGraphCreate(&raw mut inner, 0), 0);
            let added = cuGraphAddChildGraphNode(&raw mut child, graph, null(), 0, inner);
            assert_eq!(added, 0);
            assert_eq!(cuGraphDestroy(inner), 0);
            assert_eq!(cuGraphDestroy(inner), INVALID_VALUE);
            assert_eq!(cuGraphChildGraphNodeGetGraph(child, &raw mut inner), 0);
            assert_eq!(cuGraphGetNodes(inner, null_mut(), &raw mut count), 0);
            assert_eq!(cuGraphDestroyNode(child), 0);
            let told = cuGraphGetNodes(inner, null_mut(), &raw mut count);
            assert_eq!(told, INVALID_VALUE);
            assert_eq!(cuGraphDestroyNode(node), 0);
            assert_eq!(cuGraphDestroyNode(node), INVALID_VALUE);
            assert_eq!(cuGraphLaunch(made, null_mut()), 0);
            assert_eq!(cuGraphExecDestroy(made), 0);
            assert_eq!(cuGraphLaunch(made, null_mut()), INVALID_VALUE);
            assert_eq!(cuGraphExecDestroy(made), INVALID_VALUE);
            let created = cuUserObjectCreate(&raw mut object, null_mut(), nothing, 1, 1);
            assert_eq!(created, 0);
            assert_eq!(cuUserObjectRelease(object, 1), 0);
            assert_eq!(cuUserObjectRetain(object, 1), INVALID_VALUE);
        }
    });
}

#[test]
fn a_graph_of_an_event_that_is_gone_is_not_made() {
    in_process(|| {
        let backend = Backend::start();
        let mut context = null_mut();
        // SAFETY: every place is writable, every handle is one of the library's.
        unsafe {
            assert_eq!(cuInit(0), 0);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            for add in [cuGraphAddEventRecordNode, cuGraphAddEventWaitNode] {
                let [mut event, mut graph, mut node, mut made] = [null_mut(); 4];
                assert_eq!(cuEventCreate(&raw mut event, 0), 0);
                assert_eq!(cuGraphCreate(&raw mut graph, 0), 0);
                assert_eq!(add(&raw mut node, graph, null(), 0, event), 0);
                assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
                assert!(backend.messages().contains(&"GraphEvent".to_owned()));
                assert_eq!(cuEventDestroy_v2(event), 0);
                assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 1);
                let sent = backend.messages();
                assert!(!sent.contains(&"GraphEvent".to_owned()), "{sent:?}");
                let is_made = sent.iter().any(|name| name.starts_with("GraphInstantiate"));
                assert!(!is_made, "{sent:?}");
            }
        }
    });
}

/// A process with a stream, two kernels, and memory. The first kernel has been launched.
struct Ready {
    backend: Backend,
    context: Pointer,
    stream: Pointer,
    launched: Pointer,
    new: Pointer,
    memory: u64,
}

fn ready() -> Ready {
    let backend = Backend::start();
    let [mut context, mut stream, mut module] = [null_mut(); 3];
    let [mut launched, mut new] = [null_mut(); 2];
    let mut memory = 0;
    // SAFETY: every place is writable, every handle is one of the library's.
    let results = unsafe {
        [
            cuInit(0),
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            cuCtxSetCurrent(context),
            cuStreamCreateWithPriority(&raw mut stream, 1, -1),
            cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
            cuModuleGetFunction(&raw mut launched, module, c"kernel".as_ptr()),
            cuModuleGetFunction(&raw mut new, module, c"other".as_ptr()),
            cuMemAlloc_v2(&raw mut memory, 4 << 20),
        ]
    };
    assert_eq!(results, [0; 8]);
    let ready = Ready {
        backend,
        context,
        stream,
        launched,
        new,
        memory,
    };
    ready.launch(launched);
    ready
}

impl Ready {
    fn launch(&self, function: Pointer) {
        launch(function, self.stream);
    }

    /// Returns the graph of work that is captured.
    fn captured(&self, work: impl FnOnce()) -> Pointer {
        let mut graph = null_mut();
        // SAFETY: a live stream, and a place that is writable.
        unsafe {
            assert_eq!(cuStreamBeginCapture_v2(self.stream, 0), 0);
            work();
            assert_eq!(cuStreamEndCapture(self.stream, &raw mut graph), 0);
        }
        graph
    }

    /// Instantiates a graph, launches it, and returns the messages of both.
    fn made_and_launched(&self, graph: Pointer) -> Vec<String> {
        self.backend.messages();
        let mut made = null_mut();
        // SAFETY: live handles, and a place that is writable.
        unsafe {
            assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
            assert_eq!(cuGraphLaunch(made, self.stream), 0);
        }
        self.backend.messages()
    }
}

#[test]
fn a_graph_that_the_device_must_accept_is_made_and_launched_without_waiting() {
    in_process(|| {
        let ready = ready();
        let (stream, memory) = (ready.stream, ready.memory);
        let mut event = null_mut();
        // SAFETY: every place is writable, every handle is one of the library's, and the memory is the program's.
        unsafe {
            assert_eq!(cuEventCreate(&raw mut event, 0), 0);
            let graph = ready.captured(|| {
                ready.launch(ready.launched);
                assert_eq!(cuMemcpyDtoDAsync_v2(memory, memory + 4096, 64, stream), 0);
                ready.launch(ready.launched);
            });
            let [mut empty, mut record, mut fill] = [null_mut(); 3];
            let described = CUDA_MEMSET_NODE_PARAMS {
                dst: memory,
                pitch: 64,
                value: 1,
                elementSize: 4,
                width: 8,
                height: 4,
            };
            let added = [
                cuGraphAddEmptyNode(&raw mut empty, graph, null(), 0),
                cuGraphAddEventRecordNode(&raw mut record, graph, &raw const empty, 1, event),
                cuGraphAddMemsetNode(
                    &raw mut fill,
                    graph,
                    null(),
                    0,
                    &raw const described,
                    ready.context,
                ),
            ];
            assert_eq!(added, [0; 3]);
            let sent = ready.made_and_launched(graph);
            let (described, made) = sent.split_at(sent.len() - 2);
            assert_eq!(made, ["GraphInstantiate", "GraphLaunch"], "{sent:?}");
            assert!(
                described.iter().all(|name| !name.ends_with('?')),
                "{sent:?}"
            );
            // The same holds for a graph with such a child graph.
            let [mut outer, mut child] = [null_mut(); 2];
            assert_eq!(cuGraphCreate(&raw mut outer, 0), 0);
            let added = cuGraphAddChildGraphNode(&raw mut child, outer, null(), 0, graph);
            assert_eq!(added, 0);
            let sent = ready.made_and_launched(outer);
            assert!(sent.contains(&"GraphInstantiate".to_owned()), "{sent:?}");
        }
    });
}

/// Work that is captured.
type Captured = fn(&Ready);

#[test]
fn a_graph_that_the_device_may_refuse_is_asked_for() {
    let works: [(&str, Captured); 7] = [
        ("a kernel that never ran", |ready| ready.launch(ready.new)),
        ("a cooperative kernel", |ready| {
            let mut value = 7_u32;
            let mut values = [(&raw mut value).cast()];
            let (function, values) = (ready.launched, values.as_mut_ptr());
            // SAFETY: the library's handles, and a kernel with one parameter of four bytes.
            let launched = unsafe {
                cuLaunchCooperativeKernel(function, 1, 1, 1, 1, 1, 1, 0, ready.stream, values)
            };
            assert_eq!(launched, 0);
        }),
        ("a host function", |ready| {
            // SAFETY: a live stream, and a function that takes anything.
            let called = unsafe { cuLaunchHostFunc(ready.stream, nothing, null_mut()) };
            assert_eq!(called, 0);
        }),
        ("a memory operation", |ready| {
            // SAFETY: a live stream, and memory of the device.
            let written = unsafe { cuStreamWriteValue32_v2(ready.stream, ready.memory, 1, 0) };
            assert_eq!(written, 0);
        }),
        ("an allocation", |ready| {
            let mut address = 0;
            // SAFETY: a live stream, and a place that is writable.
            let made = unsafe { cuMemAllocAsync(&raw mut address, 4096, ready.stream) };
            assert_eq!(made, 0);
        }),
        ("a copy by the guest", |ready| {
            static PLACE: [std::sync::atomic::AtomicU64; 8] =
                [const { std::sync::atomic::AtomicU64::new(0) }; 8];
            let to = PLACE.as_ptr().cast_mut().cast();
            // SAFETY: a live stream, and memory on both sides that is valid as long as the process lives.
            let copied = unsafe { cuMemcpyDtoHAsync_v2(to, ready.memory, 64, ready.stream) };
            assert_eq!(copied, 0);
        }),
        ("many kernels", |ready| {
            for _ in 0..513 {
                ready.launch(ready.launched);
            }
        }),
    ];
    for (name, work) in works {
        in_process(|| {
            let ready = ready();
            let sent = ready.made_and_launched(ready.captured(|| work(&ready)));
            let asked = sent.iter().filter(|sent| *sent == "GraphInstantiate?");
            assert_eq!(asked.count(), 1, "{name}: {sent:?}");
        });
    }
}

#[test]
fn an_event_of_several_processes_is_asked_for() {
    in_process(|| {
        let ready = ready();
        let [mut event, mut graph, mut node] = [null_mut(); 3];
        // SAFETY: every place is writable, every handle is one of the library's.
        unsafe {
            assert_eq!(
                cuEventCreate(&raw mut event, DISABLE_TIMING | INTERPROCESS),
                0
            );
            assert_eq!(cuGraphCreate(&raw mut graph, 0), 0);
            let added = cuGraphAddEventRecordNode(&raw mut node, graph, null(), 0, event);
            assert_eq!(added, 0);
        }
        let sent = ready.made_and_launched(graph);
        assert!(sent.contains(&"GraphInstantiate?".to_owned()), "{sent:?}");
    });
}

#[test]
fn the_failure_to_make_a_graph_that_nobody_waited_for_ends_the_session() {
    const OUT_OF_MEMORY: u32 = CuResult::OUT_OF_MEMORY.0;
    in_process(|| {
        let ready = ready();
        let graph = ready.captured(|| ready.launch(ready.launched));
        let mut made = null_mut();
        // SAFETY: live handles, and a place that is writable.
        unsafe {
            assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
            // The worker reports the error of a record in the same way.
            ready.backend.fail(CuResult::OUT_OF_MEMORY);
            assert_eq!(cuGraphLaunch(made, ready.stream), OUT_OF_MEMORY);
            assert_eq!(cuStreamSynchronize(ready.stream), OUT_OF_MEMORY);
            let again = cuGraphInstantiateWithFlags(&raw mut made, graph, 0);
            assert_eq!(again, OUT_OF_MEMORY);
        }
    });
}

/// A program that gets the error from the call itself goes on.
#[test]
fn once_memory_was_missing_for_a_graph_every_other_waits_for_the_device() {
    in_process(|| {
        let ready = ready();
        let small = ready.captured(|| ready.launch(ready.launched));
        let large = ready.captured(|| (0..513).for_each(|_| ready.launch(ready.launched)));
        let sent = ready.made_and_launched(small);
        assert!(sent.contains(&"GraphInstantiate".to_owned()), "{sent:?}");
        let lacks_memory = &ready.backend.shared.lacks_memory;
        lacks_memory.store(true, Ordering::Release);
        for graph in [large, small] {
            let mut made = null_mut();
            // SAFETY: a live handle, and a place that is writable.
            let result = unsafe { cuGraphInstantiateWithFlags(&raw mut made, graph, 0) };
            assert_eq!(result, CuResult::OUT_OF_MEMORY.0);
        }
        lacks_memory.store(false, Ordering::Release);
        let sent = ready.made_and_launched(small);
        assert!(sent.contains(&"GraphInstantiate?".to_owned()), "{sent:?}");
    });
}
