//! Graphs: what is sent of them, and what is not.

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
    fn cuGraphInstantiateWithFlags(made: *mut Pointer, graph: Pointer, flags: u64) -> u32;
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
