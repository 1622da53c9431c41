//! Graphs: objects that the library may send to the backend, and stale handles, which it must refuse.

mod support;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use cuda as _;
use support::{Backend, in_process};

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
}

extern "C" fn nothing(_: Pointer) {}

/// Natively the handle of a destroyed object may crash the program.
#[test]
fn what_is_gone_is_refused_and_harms_nobody() {
    const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
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
                assert!(backend.shared.take().contains(&"GraphEvent".to_owned()));
                assert_eq!(cuEventDestroy_v2(event), 0);
                assert_eq!(cuGraphInstantiateWithFlags(&raw mut made, graph, 0), 1);
                let sent = backend.shared.take();
                assert!(!sent.contains(&"GraphEvent".to_owned()), "{sent:?}");
                assert!(!sent.contains(&"GraphInstantiate?".to_owned()), "{sent:?}");
            }
        }
    });
}
