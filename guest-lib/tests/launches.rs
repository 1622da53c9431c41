//! Cost of launching a kernel or a graph, on the program's thread.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

use cuda as _;
use support::calls::cuLaunchKernel;
use support::{Backend, in_process};

type Pointer = *mut c_void;

unsafe extern "C" {
    fn cuInit(flags: u32) -> u32;
    fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> u32;
    fn cuCtxSetCurrent(context: Pointer) -> u32;
    fn cuStreamCreate(stream: *mut Pointer, flags: u32) -> u32;
    fn cuModuleLoadData(module: *mut Pointer, image: *const c_void) -> u32;
    fn cuModuleGetFunction(function: *mut Pointer, module: Pointer, name: *const c_char) -> u32;
    fn cuEventCreate(event: *mut Pointer, flags: u32) -> u32;
    fn cuGraphCreate(graph: *mut Pointer, flags: u32) -> u32;
    fn cuGraphAddEmptyNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
    ) -> u32;
    fn cuGraphAddEventRecordNode(
        node: *mut Pointer,
        graph: Pointer,
        before: *const Pointer,
        count: usize,
        event: Pointer,
    ) -> u32;
    fn cuGraphInstantiateWithFlags(made: *mut Pointer, graph: Pointer, flags: u64) -> u32;
    fn cuGraphLaunch(graph: Pointer, stream: Pointer) -> u32;
    fn cuStreamBeginCapture_v2(stream: Pointer, mode: u32) -> u32;
    fn cuStreamEndCapture(stream: Pointer, graph: *mut Pointer) -> u32;
}

/// Allocator that counts each thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATED.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(place, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_launch_of_an_unchanged_graph_is_one_message_and_allocates_nothing() {
    const NODES: usize = 2000;
    const LAUNCHES: usize = 100;
    in_process(|| {
        let backend = Backend::start();
        let [mut context, mut stream, mut event] = [null_mut(); 3];
        // SAFETY: every place is writable, every handle is one of the library's.
        unsafe {
            assert_eq!(cuInit(0), 0);
            assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            assert_eq!(cuStreamCreate(&raw mut stream, 1), 0);
            assert_eq!(cuEventCreate(&raw mut event, 0), 0);
            for records in [false, true] {
                let [mut graph, mut node, mut made] = [null_mut(); 3];
                assert_eq!(cuGraphCreate(&raw mut graph, 0), 0);
                for _ in 0..NODES {
                    assert_eq!(cuGraphAddEmptyNode(&raw mut node, graph, null(), 0), 0);
                }
                if records {
                    let added = cuGraphAddEventRecordNode(&raw mut node, graph, null(), 0, event);
                    assert_eq!(added, 0);
                }
                assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 0);
                assert_eq!(cuGraphLaunch(made, stream), 0);
                backend.shared.take();
                let before = ALLOCATED.get();
                for _ in 0..LAUNCHES {
                    assert_eq!(cuGraphLaunch(made, stream), 0);
                }
                let allocated = ALLOCATED.get() - before;
                assert_eq!(allocated, 0, "with an event: {records}");
                let mut sent: Vec<String> = Vec::new();
                while sent.iter().filter(|name| *name == "GraphLaunch").count() < LAUNCHES {
                    sent.extend(backend.shared.take());
                    std::thread::yield_now();
                }
                let others = sent.iter().filter(|name| *name != "GraphLaunch");
                assert!(others.clone().all(|name| name == "FenceWrite"), "{sent:?}");
                assert!(others.count() <= LAUNCHES / 10, "{sent:?}");
            }
        }
    });
}

/// Starts a backend. Returns it with a stream and a kernel.
fn kernel() -> (Backend, Pointer, Pointer) {
    let backend = Backend::start();
    let [mut context, mut stream, mut module, mut function] = [null_mut(); 4];
    // SAFETY: every place is writable, every handle is one of the library's.
    let results = unsafe {
        [
            cuInit(0),
            cuDevicePrimaryCtxRetain(&raw mut context, 0),
            cuCtxSetCurrent(context),
            cuStreamCreate(&raw mut stream, 1),
            cuModuleLoadData(&raw mut module, c".version 8.0".as_ptr().cast()),
            cuModuleGetFunction(&raw mut function, module, c"kernel".as_ptr()),
        ]
    };
    assert_eq!(results, [0; 6]);
    (backend, stream, function)
}

#[test]
fn a_launch_of_a_kernel_is_one_message_and_allocates_nothing() {
    const LAUNCHES: usize = 100;
    in_process(|| {
        let (backend, stream, function) = kernel();
        let mut value = 7_u32;
        let mut parameters = [(&raw mut value).cast()];
        // SAFETY: every place is writable, every handle is one of the library's, and the kernel has one parameter of
        // four bytes.
        unsafe {
            let mut launch = || {
                let values = parameters.as_mut_ptr();
                cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, null_mut())
            };
            assert_eq!(launch(), 0);
            backend.shared.take();
            let before = ALLOCATED.get();
            for _ in 0..LAUNCHES {
                assert_eq!(launch(), 0);
            }
            assert_eq!(ALLOCATED.get() - before, 0);
        }
        let mut sent: Vec<String> = Vec::new();
        while sent.len() < LAUNCHES {
            sent.extend(backend.shared.take());
            std::thread::yield_now();
        }
        assert_eq!(sent, vec!["LaunchKernel"; LAUNCHES]);
    });
}

#[test]
fn a_captured_launch_allocates_its_kernel_and_its_parameters_alone() {
    const LAUNCHES: usize = 1000;
    in_process(|| {
        let (backend, stream, function) = kernel();
        let mut graph = null_mut();
        let mut value = 7_u32;
        let mut parameters = [(&raw mut value).cast()];
        // SAFETY: every place is writable, every handle is one of the library's, and the kernel has one parameter of
        // four bytes.
        unsafe {
            assert_eq!(cuStreamBeginCapture_v2(stream, 0), 0);
            let before = ALLOCATED.get();
            for _ in 0..LAUNCHES {
                let values = parameters.as_mut_ptr();
                let launched =
                    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values, null_mut());
                assert_eq!(launched, 0);
            }
            // Beside these, the tables of nodes and of handles grow now and then.
            let allocated = ALLOCATED.get() - before;
            assert!(allocated <= 2 * LAUNCHES + 64, "{allocated}");
            assert_eq!(cuStreamEndCapture(stream, &raw mut graph), 0);
            assert!(!backend.shared.take().contains(&"LaunchKernel".to_owned()));
        }
    });
}
