//! Validation of graphs: descriptions and operations with arbitrary numbers.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use support::recorder::Recorder;
use support::served::{Served, handle};
use wormhole_api::handle::Graph;
use wormhole_api::{
    AddressFree, AddressReserve, AddressReserveReply, ArrayCreate, ArrayDestroy, ContextGetLimit,
    Decode, DevicePtr, Element, EventCreate, EventDestroy, GraphBegin, GraphBody, GraphBranch,
    GraphCondition, GraphConditional, GraphCopy, GraphDestroy, GraphEdge, GraphEdges, GraphEmpty,
    GraphEnable, GraphEvent, GraphEventKind, GraphFill, GraphInstantiate, GraphKernel, GraphLaunch,
    GraphMemory, GraphUpdate, GraphUpload, Handle, Items, MemAlloc, MemAllocReply, MemCreate,
    MemFree, MemMap, MemUnmap, MemoryOperation, Message, Module, ModuleGetFunction, ModuleUnload,
    PoolCreate, PoolDestroy, PoolTrim,
};
use wormhole_backend_tests::messages::module_load;
use wormhole_device::{Device, GraphNode};
use wormhole_worker::registrar::Task;
use wormhole_worker::session::Event;

const INVALID_VALUE: u32 = wormhole_api::CuResult::INVALID_VALUE.0;
const INVALID_HANDLE: u32 = wormhole_api::CuResult::INVALID_HANDLE.0;
const OUT_OF_MEMORY: u32 = wormhole_api::CuResult::OUT_OF_MEMORY.0;
/// Bytes of the session's memory.
const BYTES: u64 = 4096;

struct Ready {
    device: Arc<Recorder>,
    served: Served,
    sequence: u64,
    memory: u64,
}

fn ready() -> Ready {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 3);
    let mut ready = Ready {
        device,
        served,
        sequence: 1,
        memory: 0,
    };
    let payload = ready.served.call(0, 1, &MemAlloc { bytes: BYTES });
    ready.memory = MemAllocReply::decode(&payload).unwrap().address.0;
    ready
}

fn node(graph: Handle<Graph>, function: u32, parameters: &[u8]) -> GraphKernel<'_> {
    GraphKernel {
        graph,
        function: handle(function),
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: Items::new(&[]),
        parameters,
    }
}

impl Ready {
    fn status<M: Message>(&mut self, message: &M) -> u32 {
        self.sequence += 1;
        self.served.ask(0, self.sequence, message);
        self.served.answer(0, self.sequence).0
    }

    /// Loads a module and a kernel of it, both under this number.
    fn load(&mut self, number: u32) -> Handle<Module> {
        let image = Box::leak(Box::new([const { AtomicU8::new(0) }; 64]));
        let address = image.as_ptr().expose_provenance() as u64;
        self.served
            .notifier
            .send(Event::ExtentAdded { address, bytes: 64 });
        let module = handle(number);
        let load = module_load(module, DevicePtr(address), 64);
        assert_eq!(self.status(&load), 0);
        let look_up = ModuleGetFunction {
            module,
            new: handle(number),
            name: b"first",
        };
        assert_eq!(self.status(&look_up), 0);
        module
    }

    fn kernel(&mut self, graph: Handle<Graph>, function: u32) -> u32 {
        self.status(&node(graph, function, &[0; 8]))
    }

    /// Describes a graph of two nodes, one after the other.
    fn describe(&mut self, index: u32) -> Handle<Graph> {
        let graph = handle(index);
        assert_eq!(self.status(&GraphBegin { new: graph }), 0);
        assert_eq!(self.fill(graph, self.memory), 0);
        assert_eq!(self.status(&GraphEmpty { graph }), 0);
        assert_eq!(self.edge(graph, 0, 1), 0);
        graph
    }

    /// Has a graph made, which the device holds until `instantiate` is let go. Slot 2 is answered then.
    fn begin_graph(&mut self) {
        let graph = self.describe(1);
        self.device.hold("instantiate");
        self.served.ask(2, 1, &GraphInstantiate { graph, flags: 0 });
        self.device.wait_for("instantiate", 1);
    }

    fn executable(&mut self, index: u32) -> Handle<Graph> {
        let graph = self.describe(index);
        assert_eq!(self.instantiate(graph), 0);
        graph
    }

    fn fill(&mut self, graph: Handle<Graph>, address: u64) -> u32 {
        self.status(&GraphFill {
            graph,
            destination: DevicePtr(address),
            pitch: 64,
            width: 8,
            height: 4,
            value: 1,
            element: Element::Word,
        })
    }

    fn copy(&mut self, graph: Handle<Graph>, to: u64, extent: [u64; 3]) -> u32 {
        self.status(&GraphCopy {
            graph,
            extent,
            to_array: None,
            to_origin: [0; 3],
            to_memory: DevicePtr(to),
            to_pitch: 64,
            to_rows: 4,
            from_array: None,
            from_origin: [0; 3],
            from_memory: DevicePtr(self.memory),
            from_pitch: 64,
            from_rows: 4,
        })
    }

    fn write(&mut self, graph: Handle<Graph>, address: u64) -> u32 {
        self.status(&GraphMemory {
            graph,
            operations: Items::new(&[MemoryOperation {
                kind: 2,
                flags: 0,
                address,
                value: 1,
            }]),
        })
    }

    fn edge(&mut self, graph: Handle<Graph>, from: u32, to: u32) -> u32 {
        self.status(&GraphEdges {
            graph,
            edges: Items::new(&[GraphEdge { from, to, data: 0 }]),
        })
    }

    fn instantiate(&mut self, graph: Handle<Graph>) -> u32 {
        self.status(&GraphInstantiate { graph, flags: 0 })
    }

    fn launch(&mut self, graph: Handle<Graph>) -> u32 {
        self.status(&GraphLaunch {
            graph,
            stream: Handle::LEGACY,
        })
    }

    fn enable(&mut self, graph: Handle<Graph>, node: u32, enabled: u32) -> u32 {
        self.status(&GraphEnable {
            graph,
            node,
            enabled,
        })
    }
}

impl Ready {
    fn condition(&mut self, graph: Handle<Graph>) {
        self.served.record(&GraphCondition {
            graph,
            default: 1,
            assigned: 1,
        });
    }

    fn conditional(
        &mut self,
        graph: Handle<Graph>,
        condition: u32,
        branch: GraphBranch,
        bodies: u32,
    ) -> u32 {
        self.status(&GraphConditional {
            graph,
            condition,
            branch,
            bodies,
        })
    }

    fn body(&mut self, graph: Handle<Graph>, body: u32) -> u32 {
        self.status(&GraphBody { graph, body })
    }

    /// Describes a graph with a condition, a conditional node, and a node in each of its two
    /// bodies.
    fn describe_conditional(&mut self, index: u32) -> Handle<Graph> {
        let graph = self.describe(index);
        self.condition(graph);
        assert_eq!(self.conditional(graph, 1, GraphBranch::If, 2), 0);
        for body in 1..3 {
            assert_eq!(self.body(graph, body), 0);
            assert_eq!(self.fill(graph, self.memory), 0);
        }
        graph
    }
}

/// Adds a part that must be refused to a description.
type Part = fn(&mut Ready, Handle<Graph>) -> u32;

#[test]
fn a_description_names_what_the_session_has_or_is_never_executed() {
    let parts: [(Part, u32); 10] = [
        (|ready, graph| ready.fill(graph, 4096), INVALID_VALUE),
        // The last row ends beyond the memory.
        (
            |ready, graph| ready.fill(graph, ready.memory + BYTES - 192 - 28),
            INVALID_VALUE,
        ),
        (
            |ready, graph| ready.copy(graph, 4096, [8, 1, 1]),
            INVALID_VALUE,
        ),
        (
            |ready, graph| ready.copy(graph, ready.memory, [8, 4, u64::MAX / 64]),
            INVALID_VALUE,
        ),
        (
            |ready, graph| ready.copy(graph, ready.memory, [8, 0, 1]),
            INVALID_VALUE,
        ),
        (
            |ready, graph| ready.write(graph, u64::MAX - 3),
            INVALID_VALUE,
        ),
        (|ready, graph| ready.edge(graph, 1, 0), INVALID_VALUE),
        (|ready, graph| ready.edge(graph, 1, 2), INVALID_VALUE),
        (
            |ready, graph| {
                ready.status(&GraphEvent {
                    graph,
                    event: handle(9),
                    kind: GraphEventKind::Wait,
                })
            },
            INVALID_HANDLE,
        ),
        (|ready, graph| ready.kernel(graph, 9), INVALID_HANDLE),
    ];
    let mut ready = ready();
    for (index, (part, code)) in (1..).zip(parts) {
        let graph = ready.describe(index);
        // A record has no answer, so the instantiation must fail.
        assert_eq!(part(&mut ready, graph), 0, "part {index}");
        // Parts added later do not repair the description.
        assert_eq!(ready.status(&GraphEmpty { graph }), 0);
        assert_eq!(ready.instantiate(graph), code, "part {index}");
        assert_eq!(ready.launch(graph), INVALID_HANDLE);
    }
    // The session goes on.
    let graph = ready.executable(50);
    assert_eq!(ready.launch(graph), 0);
}

#[test]
fn a_graph_that_nobody_waits_for_is_made_before_the_records_behind_it() {
    let mut ready = ready();
    let module = ready.load(1);
    for index in 1..50 {
        let graph = handle(index);
        ready.served.record(&GraphBegin { new: graph });
        ready.served.record(&node(graph, 1, &[0; 8]));
        ready.served.record(&GraphInstantiate { graph, flags: 0 });
        for _ in 0..3 {
            ready.served.record(&GraphLaunch {
                graph,
                stream: Handle::LEGACY,
            });
        }
        ready.served.record(&GraphDestroy { graph });
    }
    let from = ready.describe(60);
    ready.served.record(&GraphInstantiate {
        graph: from,
        flags: 0,
    });
    // An update finds the executable graph too.
    let update = ready.describe(61);
    assert_eq!(
        ready.status(&GraphUpdate {
            graph: from,
            from: update
        }),
        0
    );
    assert_eq!(ready.served.status.load(), None);
    assert_eq!(ready.device.arrivals("instantiate"), 50);
    // The executor made them all, in the order of the ring.
    let threads = ready.device.threads("instantiate");
    assert!(threads.iter().all(|thread| *thread == threads[0]));
    // No handle of the driver's outlives its module.
    ready.load(2);
    assert_eq!(ready.status(&ModuleUnload { module }), 0);
}

#[test]
fn a_graph_that_nobody_waits_for_and_that_fails_ends_the_session_with_its_error() {
    type Break = fn(&mut Ready, Handle<Graph>);
    let breaks: [(Break, u32); 5] = [
        (
            |ready, _| ready.device.lacks_memory.store(true, Ordering::Release),
            OUT_OF_MEMORY,
        ),
        (
            |ready, graph| assert_eq!(ready.fill(graph, 4096), 0),
            INVALID_VALUE,
        ),
        (
            |ready, graph| assert_eq!(ready.kernel(graph, 9), 0),
            INVALID_HANDLE,
        ),
        (
            |ready, graph| {
                let module = ready.load(1);
                assert_eq!(ready.kernel(graph, 1), 0);
                assert_eq!(ready.status(&ModuleUnload { module }), 0);
            },
            INVALID_HANDLE,
        ),
        (
            |ready, graph| {
                assert_eq!(ready.status(&GraphDestroy { graph }), 0);
            },
            INVALID_HANDLE,
        ),
    ];
    for (number, (harm, code)) in breaks.into_iter().enumerate() {
        let mut ready = ready();
        let graph = ready.describe(5);
        harm(&mut ready, graph);
        ready.served.record(&GraphInstantiate { graph, flags: 0 });
        // The handle names no graph, so that it can be used again.
        ready.describe(5);
        let cause = ready.served.status.load().unwrap();
        assert_eq!(cause.result, code, "case {number}");
        let arrived = usize::from(code == OUT_OF_MEMORY);
        assert_eq!(
            ready.device.arrivals("instantiate"),
            arrived,
            "case {number}"
        );
    }
}

#[test]
fn a_conditional_node_has_a_condition_and_bodies_of_its_own() {
    const NOT_SUPPORTED: u32 = wormhole_api::CuResult::NOT_SUPPORTED.0;
    fn add(condition: u32, branch: GraphBranch, bodies: u32) -> impl Fn(&mut Ready, Handle<Graph>) {
        move |ready, graph| {
            ready.condition(graph);
            assert_eq!(ready.conditional(graph, condition, branch, bodies), 0);
        }
    }
    use GraphBranch::{If, Switch, While};
    type Part = Box<dyn Fn(&mut Ready, Handle<Graph>)>;
    let parts: Vec<(Part, u32)> = vec![
        // The description's condition has a node already; the test has added one more condition.
        (Box::new(add(1, If, 1)), INVALID_VALUE),
        (Box::new(add(0, If, 1)), INVALID_VALUE),
        (Box::new(add(3, If, 1)), INVALID_VALUE),
        (Box::new(add(u32::MAX, If, 1)), INVALID_VALUE),
        (Box::new(add(2, If, 0)), INVALID_VALUE),
        (Box::new(add(2, If, 3)), INVALID_VALUE),
        (Box::new(add(2, While, 0)), INVALID_VALUE),
        (Box::new(add(2, While, 2)), INVALID_VALUE),
        (Box::new(add(2, Switch, 0)), INVALID_VALUE),
        (Box::new(add(2, Switch, u32::MAX)), OUT_OF_MEMORY),
        (Box::new(add(2, Switch, 1 << 16)), OUT_OF_MEMORY),
        // The graph has two bodies beside its own, number 0.
        (
            Box::new(|ready, graph| assert_eq!(ready.body(graph, 3), 0)),
            INVALID_VALUE,
        ),
        (
            Box::new(|ready, graph| assert_eq!(ready.body(graph, u32::MAX), 0)),
            INVALID_VALUE,
        ),
        // From one body to another, and from the node to its own body.
        (
            Box::new(|ready, graph| assert_eq!(ready.edge(graph, 3, 4), 0)),
            INVALID_VALUE,
        ),
        (
            Box::new(|ready, graph| assert_eq!(ready.edge(graph, 2, 3), 0)),
            INVALID_VALUE,
        ),
        // Nodes that wait may not be in a body.
        (
            Box::new(|ready, graph| assert_eq!(ready.write(graph, ready.memory), 0)),
            INVALID_VALUE,
        ),
        (
            Box::new(|ready, graph| {
                ready.served.record(&GraphCondition {
                    graph,
                    default: 1,
                    assigned: 2,
                });
            }),
            INVALID_VALUE,
        ),
        (
            Box::new(|ready, graph| {
                for depth in 1..=128 {
                    add(depth + 1, While, 1)(ready, graph);
                    assert_eq!(ready.body(graph, depth + 2), 0);
                }
            }),
            NOT_SUPPORTED,
        ),
    ];
    let mut ready = ready();
    for (index, (part, code)) in (1..).zip(parts) {
        let graph = ready.describe_conditional(index);
        part(&mut ready, graph);
        assert_eq!(ready.instantiate(graph), code, "part {index}");
        assert_eq!(ready.launch(graph), INVALID_HANDLE);
    }
    assert_eq!(ready.device.arrivals("instantiate"), 0);
    // The greatest depth, and back to the graph's own body.
    let graph = ready.describe_conditional(50);
    for depth in 1..128 {
        add(depth + 1, While, 1)(&mut ready, graph);
        assert_eq!(ready.body(graph, depth + 2), 0);
    }
    assert_eq!(ready.body(graph, 0), 0);
    let memory = ready.memory;
    assert_eq!(ready.write(graph, memory), 0);
    assert_eq!(ready.edge(graph, 2, 132), 0);
    assert_eq!(ready.instantiate(graph), 0);
    assert_eq!(ready.launch(graph), 0);
    // An executable graph accepts no parts.
    assert_eq!(ready.body(graph, 1), INVALID_HANDLE);
    assert_eq!(ready.conditional(graph, 140, If, 1), INVALID_HANDLE);
}

#[test]
fn an_executable_graph_is_no_description_and_a_description_is_not_launched() {
    let mut ready = ready();
    let described = ready.describe(1);
    assert_eq!(ready.launch(described), INVALID_HANDLE);
    assert_eq!(ready.enable(described, 0, 0), INVALID_HANDLE);
    assert_eq!(ready.status(&GraphBegin { new: described }), INVALID_HANDLE);
    let graph = ready.executable(2);
    let memory = ready.memory;
    assert_eq!(ready.fill(graph, memory), INVALID_HANDLE);
    assert_eq!(ready.edge(graph, 0, 1), INVALID_HANDLE);
    assert_eq!(ready.instantiate(graph), INVALID_HANDLE);
    // Upload to a stream and enabling of a node that do not exist.
    let upload = GraphUpload {
        graph,
        stream: handle(77),
    };
    assert_eq!(ready.status(&upload), INVALID_HANDLE);
    assert_eq!(ready.enable(graph, 1, 0), 0);
    assert_eq!(ready.enable(graph, 2, 0), INVALID_VALUE);
    assert_eq!(ready.enable(graph, 0, 2), INVALID_VALUE);
    assert_eq!(ready.launch(graph), 0);
}

#[test]
fn an_update_takes_a_description_and_leaves_the_graph_as_it_was_without_one() {
    let mut ready = ready();
    let graph = ready.executable(1);
    let missing = GraphUpdate {
        graph,
        from: handle(9),
    };
    assert_eq!(ready.status(&missing), INVALID_HANDLE);
    assert_eq!(
        ready.status(&GraphUpdate { graph, from: graph }),
        INVALID_HANDLE
    );
    assert_eq!(ready.launch(graph), 0);
    let from = ready.describe(2);
    assert_eq!(ready.status(&GraphUpdate { graph, from }), 0);
    assert_eq!(ready.instantiate(from), INVALID_HANDLE);
    assert_eq!(ready.launch(graph), 0);
    // An update with a refused description changes nothing.
    let refused = ready.describe(3);
    assert_eq!(ready.fill(refused, 4096), 0);
    let message = GraphUpdate {
        graph,
        from: refused,
    };
    assert_eq!(ready.status(&message), INVALID_VALUE);
    assert_eq!(ready.launch(graph), 0);
    assert_eq!(ready.status(&GraphDestroy { graph }), 0);
    assert_eq!(ready.status(&GraphDestroy { graph }), INVALID_HANDLE);
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
}

#[test]
fn no_graph_is_made_of_a_kernel_whose_module_is_gone() {
    let mut ready = ready();
    let module = ready.load(1);
    let (graph, from) = (ready.describe(1), ready.describe(2));
    for graph in [graph, from] {
        assert_eq!(ready.kernel(graph, 1), 0);
    }
    let executable = ready.executable(3);
    assert_eq!(ready.status(&ModuleUnload { module }), 0);
    assert_eq!(ready.instantiate(graph), INVALID_HANDLE);
    let update = GraphUpdate {
        graph: executable,
        from,
    };
    assert_eq!(ready.status(&update), INVALID_HANDLE);
    // The device was called for the graph without a kernel only.
    assert_eq!(ready.device.arrivals("instantiate"), 1);
    assert_eq!(ready.device.arrivals("update_graph"), 0);
    assert_eq!(ready.launch(executable), 0);
}

#[test]
fn a_graph_whose_kernel_is_gone_is_neither_launched_nor_updated() {
    let mut ready = ready();
    let module = ready.load(1);
    let graph = ready.describe(1);
    assert_eq!(ready.kernel(graph, 1), 0);
    assert_eq!(ready.instantiate(graph), 0);
    assert_eq!(ready.launch(graph), 0);
    let from = ready.describe(2);
    assert_eq!(ready.status(&ModuleUnload { module }), 0);
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
    assert_eq!(ready.status(&GraphUpdate { graph, from }), INVALID_HANDLE);
    assert_eq!(ready.device.arrivals("update_graph"), 0);
    assert_eq!(ready.status(&GraphDestroy { graph }), 0);
}

#[test]
fn a_module_is_unloaded_when_no_graph_is_being_made_of_it() {
    let mut ready = ready();
    let module = ready.load(1);
    let graph = ready.describe(1);
    assert_eq!(ready.kernel(graph, 1), 0);
    ready.device.hold("instantiate");
    ready
        .served
        .ask(1, 1, &GraphInstantiate { graph, flags: 0 });
    ready.device.wait_for("instantiate", 1);
    ready.served.ask(2, 1, &ModuleUnload { module });
    // Requests are served in order, so once this is answered the unload has been served too.
    assert_eq!(ready.status(&ModuleUnload { module }), INVALID_HANDLE);
    assert_eq!(ready.device.arrivals("unload"), 0);
    ready.device.let_go("instantiate");
    assert_eq!(ready.served.answer(1, 1).0, 0);
    assert_eq!(ready.served.answer(2, 1).0, 0);
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
}

#[test]
fn a_module_that_a_record_unloads_stays_while_a_graph_is_being_made() {
    let mut ready = ready();
    let (used, other) = (ready.load(1), ready.load(2));
    let graph = ready.describe(1);
    assert_eq!(ready.kernel(graph, 1), 0);
    ready.device.hold("instantiate");
    ready
        .served
        .ask(1, 1, &GraphInstantiate { graph, flags: 0 });
    ready.device.wait_for("instantiate", 1);
    for module in [used, other] {
        ready.served.record(&ModuleUnload { module });
        assert_eq!(ready.status(&ModuleUnload { module }), INVALID_HANDLE);
    }
    assert_eq!(ready.device.arrivals("unload"), 0);
    ready.device.let_go("instantiate");
    assert_eq!(ready.served.answer(1, 1).0, 0);
    ready.device.wait_for("unload", 2);
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
    assert_eq!(ready.served.status.load(), None);
}

#[test]
fn a_graph_is_destroyed_before_the_module_of_its_kernel_is_unloaded() {
    const ENDS: &[&str] = &["instantiate", "update_graph", "destroy_graph", "unload"];
    let mut ready = ready();
    let (first, second, third) = (ready.load(1), ready.load(2), ready.load(3));
    let (graph, from, other) = (ready.describe(1), ready.describe(2), ready.describe(3));
    for (graph, function) in [(graph, 1), (from, 2), (other, 3)] {
        assert_eq!(ready.kernel(graph, function), 0);
    }
    assert_eq!(ready.instantiate(graph), 0);
    assert_eq!(ready.status(&GraphUpdate { graph, from }), 0);
    // The graph names none of its kernels any more.
    assert_eq!(ready.status(&ModuleUnload { module: first }), 0);
    assert_eq!(ready.launch(graph), 0);
    assert_eq!(ready.status(&ModuleUnload { module: second }), 0);
    let mut expected = vec!["instantiate", "update_graph", "unload", "destroy_graph"];
    expected.push("unload");
    assert_eq!(ready.device.order(ENDS), expected);
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
    assert_eq!(ready.enable(graph, 0, 0), INVALID_HANDLE);
    assert_eq!(ready.status(&GraphDestroy { graph }), 0);
    assert_eq!(ready.status(&GraphDestroy { graph }), INVALID_HANDLE);
    // A record unloads the module while the graph is being made.
    let graph = other;
    ready.device.hold("instantiate");
    ready
        .served
        .ask(1, 1, &GraphInstantiate { graph, flags: 0 });
    ready.device.wait_for("instantiate", 2);
    ready.served.record(&ModuleUnload { module: third });
    ready.device.let_go("instantiate");
    assert_eq!(ready.served.answer(1, 1).0, 0);
    ready.device.wait_for("unload", 3);
    expected.extend(["instantiate", "destroy_graph", "unload"]);
    assert_eq!(ready.device.order(ENDS), expected);
    assert_eq!(ready.status(&GraphDestroy { graph }), 0);
}

#[test]
fn while_a_module_is_being_unloaded_no_graph_uses_its_kernels() {
    let mut ready = ready();
    let module = ready.load(1);
    let (described, executable, from) = (ready.describe(1), ready.describe(2), ready.describe(3));
    for graph in [described, executable, from] {
        assert_eq!(ready.kernel(graph, 1), 0);
    }
    assert_eq!(ready.instantiate(executable), 0);
    ready.device.is_busy.store(true, Ordering::Release);
    ready.device.hold("unload");
    ready.served.ask(1, 1, &ModuleUnload { module });
    ready.device.wait_for("unload", 1);
    assert_eq!(ready.launch(executable), INVALID_HANDLE);
    assert_eq!(ready.enable(executable, 0, 0), INVALID_HANDLE);
    assert_eq!(ready.instantiate(described), INVALID_HANDLE);
    let graph = executable;
    assert_eq!(ready.status(&GraphUpdate { graph, from }), INVALID_HANDLE);
    ready.device.let_go("unload");
    assert_eq!(ready.served.answer(1, 1).0, 0);
    assert_eq!(ready.device.arrivals("instantiate"), 1);
    assert_eq!(ready.device.arrivals("update_graph"), 0);
}

#[test]
fn what_is_refused_of_a_description_leaves_the_session_alive() {
    let mut ready = ready();
    let graph = ready.describe(1);
    ready.served.record(&GraphEvent {
        graph,
        event: handle(9),
        kind: GraphEventKind::Record,
    });
    assert_eq!(ready.instantiate(graph), INVALID_HANDLE);
    assert_eq!(ready.served.status.load(), None);
}

#[test]
fn dependencies_of_every_kind_arrive_as_they_were_sent() {
    let mut ready = ready();
    ready.load(1);
    let graph = handle(1);
    assert_eq!(ready.status(&GraphBegin { new: graph }), 0);
    for _ in 0..3 {
        ready.served.record(&node(graph, 1, &[0; 8]));
    }
    // An edge from the launch-order port, a full dependency, and a programmatic one.
    let kinds = [(0, 1, [2, 0, 0]), (0, 2, [0; 3]), (1, 2, [1, 0, 1])];
    let sent = kinds.map(|(from, to, [port, to_port, kind])| GraphEdge {
        from,
        to,
        data: u32::from_le_bytes([port, to_port, kind, 0]),
    });
    let edges = Items::new(&sent);
    assert_eq!(ready.status(&GraphEdges { graph, edges }), 0);
    assert_eq!(ready.instantiate(graph), 0);
    let arrived = ready.device.edges.lock().unwrap();
    let arrived: Vec<_> = arrived.iter().map(|e| (e.from, e.to, e.data)).collect();
    assert_eq!(arrived, kinds);
}

#[test]
fn a_dependency_of_no_kind_is_refused() {
    let mut ready = ready();
    for (index, data) in (1..).zip([[3, 0, 0, 0], [0, 1, 0, 0], [1, 0, 2, 0]]) {
        let graph = ready.describe(index);
        let data = u32::from_le_bytes(data);
        let (from, to) = (0, 1);
        let edges = [GraphEdge { from, to, data }];
        let edges = Items::new(&edges);
        assert_eq!(ready.status(&GraphEdges { graph, edges }), 0);
        assert_eq!(ready.instantiate(graph), INVALID_VALUE);
    }
    assert_eq!(ready.device.arrivals("instantiate"), 0);
}

#[test]
fn nodes_may_have_many_edges() {
    const LAYER: u32 = 128;
    let mut ready = ready();
    let graph = handle(1);
    assert_eq!(ready.status(&GraphBegin { new: graph }), 0);
    for _ in 0..3 * LAYER {
        ready.served.record(&GraphEmpty { graph });
    }
    let all =
        |from: u32| (0..LAYER * LAYER).map(move |n| (from + n / LAYER, from + LAYER + n % LAYER));
    let edges: Vec<_> = all(0)
        .chain(all(LAYER))
        .map(|(from, to)| GraphEdge { from, to, data: 0 })
        .collect();
    for edges in edges.chunks(1024) {
        let edges = Items::new(edges);
        assert_eq!(ready.status(&GraphEdges { graph, edges }), 0);
    }
    assert_eq!(ready.instantiate(graph), 0);
}

#[test]
fn an_executable_graph_leaves_its_room_to_the_next_description() {
    let mut ready = ready();
    ready.load(1);
    // Bytes near the limit on all descriptions together.
    let parameters = vec![0; 32_000];
    for index in 1..3 {
        let graph = handle(index);
        assert_eq!(ready.status(&GraphBegin { new: graph }), 0);
        for _ in 0..(300 << 20) / parameters.len() {
            ready.served.record(&node(graph, 1, &parameters));
        }
        assert_eq!(ready.instantiate(graph), 0);
    }
}

#[test]
fn memory_that_a_description_names_counts_for_its_limit() {
    const MAPPINGS: u64 = 512;
    const GRAPHS: u32 = 40;
    let mut ready = ready();
    ready.load(1);
    let (part, memory) = (2 << 20, handle(1));
    let reserve = AddressReserve {
        bytes: MAPPINGS * part,
        alignment: 0,
        hint: 0,
    };
    let payload = ready.served.call(1, 1, &reserve);
    let start = AddressReserveReply::decode(&payload).unwrap().address.0;
    let create = MemCreate {
        new: memory,
        bytes: part,
        handle_types: 0,
    };
    ready.served.call(1, 2, &create);
    for address in (0..MAPPINGS).map(|number| DevicePtr(start + number * part)) {
        ready.served.record(&MemMap { address, memory });
    }
    // Leaves room for some of the descriptions.
    let parameters = vec![0; 32_000];
    let large = handle(100);
    assert_eq!(ready.status(&GraphBegin { new: large }), 0);
    let node_bytes = parameters.len() + size_of::<GraphNode>();
    for _ in 0..(512 << 20) / node_bytes - 8 {
        ready.served.record(&node(large, 1, &parameters));
    }
    let graphs: Vec<Handle<Graph>> = (2..2 + GRAPHS).map(handle).collect();
    for &graph in &graphs {
        assert_eq!(ready.status(&GraphBegin { new: graph }), 0);
        ready.served.record(&GraphFill {
            graph,
            destination: DevicePtr(start),
            pitch: MAPPINGS * part,
            width: MAPPINGS * part,
            height: 1,
            value: 0,
            element: Element::Byte,
        });
    }
    let made = graphs.into_iter().map(|graph| ready.instantiate(graph));
    let made: Vec<_> = made.collect();
    assert_eq!((made[0], made[made.len() - 1]), (0, OUT_OF_MEMORY));
}

/// Releases a graph that copies to an array after the array's handle was destroyed.
type End = fn(&mut Ready, Handle<Graph>) -> u32;

#[test]
fn an_array_that_a_graph_was_the_last_to_use_holds_nobody_up() {
    let ends: [(End, u32); 5] = [
        (|ready, graph| ready.status(&GraphDestroy { graph }), 0),
        (
            |ready, graph| {
                assert_eq!(ready.instantiate(graph), 0);
                ready.status(&GraphDestroy { graph })
            },
            0,
        ),
        (
            |ready, graph| {
                assert_eq!(ready.instantiate(graph), 0);
                let from = ready.describe(2);
                ready.status(&GraphUpdate { graph, from })
            },
            0,
        ),
        (
            |ready, graph| {
                assert_eq!(ready.fill(graph, 4096), 0);
                ready.instantiate(graph)
            },
            INVALID_VALUE,
        ),
        (
            |ready, from| {
                let graph = handle(9);
                ready.status(&GraphUpdate { graph, from })
            },
            INVALID_HANDLE,
        ),
    ];
    for (number, (end, code)) in ends.into_iter().enumerate() {
        let mut ready = ready();
        let array = handle(1);
        let create = ArrayCreate {
            new: array,
            extent: [16, 4, 0],
            format: 1,
            channels: 1,
            flags: 0,
        };
        assert_eq!(ready.status(&create), 0);
        let raw = ready.device.last_made();
        let graph = ready.describe(1);
        let copy = GraphCopy {
            graph,
            extent: [8, 4, 1],
            to_array: Some(array),
            to_origin: [0; 3],
            to_memory: DevicePtr(0),
            to_pitch: 0,
            to_rows: 0,
            from_array: None,
            from_origin: [0; 3],
            from_memory: DevicePtr(ready.memory),
            from_pitch: 64,
            from_rows: 4,
        };
        assert_eq!(ready.status(&copy), 0);
        assert_eq!(ready.status(&ArrayDestroy { array }), 0);
        assert!(ready.device.is_alive(raw));
        ready.device.hold("array_destroy");
        assert_eq!(end(&mut ready, graph), code, "end {number}");
        ready.device.wait_for("array_destroy", 1);
        // The session is served while the device is busy with the destruction.
        ready.describe(7);
        assert!(ready.device.is_alive(raw), "end {number}");
        ready.device.let_go("array_destroy");
    }
}

#[test]
fn a_graph_that_names_arena_is_launched_while_the_session_has_it() {
    type Part = fn(&mut Ready, Handle<Graph>, u64) -> u32;
    let parts: [Part; 3] = [
        |ready, graph, arena| ready.fill(graph, arena),
        |ready, graph, arena| ready.copy(graph, arena, [8, 4, 1]),
        |ready, graph, arena| ready.write(graph, arena),
    ];
    let arena = Box::leak(Box::new([const { AtomicU8::new(0) }; 2048]));
    let address = (arena.as_ptr().expose_provenance() as u64).next_multiple_of(64);
    let granted = |bytes| Event::ExtentAdded { address, bytes };
    let mut ready = ready();
    for (part, index) in parts.into_iter().zip(1..) {
        ready.served.notifier.send(granted(1024));
        let graph = ready.describe(index);
        assert_eq!(part(&mut ready, graph, address), 0);
        assert_eq!(ready.instantiate(graph), 0);
        assert_eq!(ready.launch(graph), 0);
        let returned = || Event::ExtentRemoved {
            address,
            release: Task::new(|_| ()),
        };
        ready.served.notifier.send(returned());
        assert_eq!(ready.launch(graph), INVALID_HANDLE, "part {index}");
        // Less of it is not what was described.
        ready.served.notifier.send(granted(512));
        assert_eq!(ready.launch(graph), INVALID_HANDLE, "part {index}");
        ready.served.notifier.send(returned());
        // The device knows the extent that is gone.
        ready.served.notifier.send(granted(1024));
        assert_eq!(ready.launch(graph), INVALID_HANDLE, "part {index}");
        ready.served.notifier.send(returned());
    }
}

#[test]
fn what_a_failed_update_named_stays_as_long_as_the_graph() {
    let mut ready = ready();
    let (first, second) = (ready.load(1), ready.load(2));
    let (graph, from) = (ready.describe(1), ready.describe(2));
    assert_eq!(ready.kernel(graph, 1), 0);
    assert_eq!(ready.instantiate(graph), 0);
    let arena = Box::leak(Box::new([const { AtomicU8::new(0) }; 2048]));
    let address = (arena.as_ptr().expose_provenance() as u64).next_multiple_of(64);
    let bytes = 1024;
    ready
        .served
        .notifier
        .send(Event::ExtentAdded { address, bytes });
    let event = handle(1);
    assert_eq!(
        ready.status(&EventCreate {
            new: event,
            flags: 2
        }),
        0
    );
    let raw = ready.device.last_made();
    let named = GraphEvent {
        graph: from,
        event,
        kind: GraphEventKind::Record,
    };
    assert_eq!(ready.status(&named), 0);
    assert_eq!(ready.kernel(from, 2), 0);
    assert_eq!(ready.fill(from, address), 0);
    ready.device.lacks_memory.store(true, Ordering::Release);
    let update = GraphUpdate { graph, from };
    assert_eq!(ready.status(&update), OUT_OF_MEMORY);
    ready.device.lacks_memory.store(false, Ordering::Release);
    assert_eq!(ready.launch(graph), 0);
    // The event has no handle any more, and lives.
    assert_eq!(ready.status(&EventDestroy { event }), 0);
    assert!(ready.device.is_alive(raw));
    let release = Task::new(|_| ());
    ready
        .served
        .notifier
        .send(Event::ExtentRemoved { address, release });
    assert_eq!(ready.launch(graph), INVALID_HANDLE);
    assert_eq!(ready.status(&ModuleUnload { module: second }), 0);
    let ends = ready.device.order(&["destroy_graph", "unload"]);
    assert_eq!(ends, ["destroy_graph", "unload"]);
    assert_eq!(ready.status(&GraphDestroy { graph }), 0);
    assert_eq!(ready.status(&ModuleUnload { module: first }), 0);
}

#[test]
fn no_graph_is_made_of_memory_that_is_gone() {
    type Part = fn(&mut Ready, Handle<Graph>, u64) -> u32;
    let parts: [Part; 3] = [
        |ready, graph, memory| ready.fill(graph, memory + 256),
        |ready, graph, memory| ready.copy(graph, memory + 256, [8, 4, 1]),
        |ready, graph, memory| ready.write(graph, memory + 256),
    ];
    let mut ready = ready();
    let executable = ready.executable(1);
    for (part, index) in parts.into_iter().zip(2..) {
        let payload = ready
            .served
            .call(1, index.into(), &MemAlloc { bytes: BYTES });
        let address = MemAllocReply::decode(&payload).unwrap().address;
        let graphs = [ready.describe(10 * index), ready.describe(10 * index + 1)];
        for graph in graphs {
            assert_eq!(part(&mut ready, graph, address.0), 0);
        }
        assert_eq!(ready.status(&MemFree { address }), 0);
        let [graph, from] = graphs;
        assert_eq!(ready.instantiate(graph), INVALID_HANDLE, "part {index}");
        let update = GraphUpdate {
            graph: executable,
            from,
        };
        assert_eq!(ready.status(&update), INVALID_HANDLE, "part {index}");
    }
    assert_eq!(ready.device.arrivals("instantiate"), 1);
    assert_eq!(ready.device.arrivals("update_graph"), 0);
}

/// Asserts that the device frees what this message frees, by its function `call`, once the graph is made that is being made
/// when the message comes.
fn is_freed_behind_a_graph<M: Message>(mut ready: Ready, free: &M, call: &'static str) {
    ready.served.call(1, 2, &ContextGetLimit { limit: 0 });
    let of_jobs = ready.device.threads("context_get_limit");
    ready.begin_graph();
    ready.served.ask(1, 3, free);
    // Requests are served in order.
    assert_eq!(
        ready.status(free),
        INVALID_VALUE,
        "it is no longer the guest's"
    );
    assert_eq!(ready.device.arrivals(call), 0);
    ready.device.let_go("instantiate");
    assert_eq!(ready.served.answer(2, 1).0, 0);
    assert_eq!(ready.served.answer(1, 3).0, 0);
    assert_eq!(ready.device.arrivals(call), 1);
    // The thread of the slot would have freed it at once.
    assert_ne!(ready.device.threads(call), of_jobs);
}

#[test]
fn memory_is_freed_once_the_graph_that_is_being_made_is_made() {
    let ready = ready();
    let payload = ready.served.call(1, 1, &MemAlloc { bytes: BYTES });
    let address = MemAllocReply::decode(&payload).unwrap().address;
    is_freed_behind_a_graph(ready, &MemFree { address }, "mem_free");
}

#[test]
fn addresses_stay_reserved_while_a_graph_is_being_made() {
    let ready = ready();
    let bytes = 2 << 20;
    let reserve = AddressReserve {
        bytes,
        alignment: 0,
        hint: 0,
    };
    let payload = ready.served.call(1, 1, &reserve);
    let address = AddressReserveReply::decode(&payload).unwrap().address;
    is_freed_behind_a_graph(ready, &AddressFree { address, bytes }, "address_free");
}

#[test]
fn addresses_that_a_record_frees_stay_reserved_while_a_graph_is_being_made() {
    let mut ready = ready();
    let bytes = 2 << 20;
    let reserve = AddressReserve {
        bytes,
        alignment: 0,
        hint: 0,
    };
    let payload = ready.served.call(1, 1, &reserve);
    let address = AddressReserveReply::decode(&payload).unwrap().address;
    let graph = ready.describe(1);
    ready.device.hold("instantiate");
    ready
        .served
        .ask(2, 1, &GraphInstantiate { graph, flags: 0 });
    ready.device.wait_for("instantiate", 1);
    let free = AddressFree { address, bytes };
    ready.served.record(&free);
    assert_eq!(ready.status(&free), INVALID_VALUE, "no longer the guest's");
    assert_eq!(ready.device.arrivals("address_free"), 0);
    ready.device.let_go("instantiate");
    assert_eq!(ready.served.answer(2, 1).0, 0);
    ready.device.wait_for("address_free", 1);
    assert_eq!(ready.served.status.load(), None);
}

#[test]
fn memory_stays_mapped_while_a_graph_is_being_made() {
    let ready = ready();
    let (bytes, memory) = (2 << 20, handle(1));
    let reserve = AddressReserve {
        bytes,
        alignment: 0,
        hint: 0,
    };
    let payload = ready.served.call(1, 1, &reserve);
    let address = AddressReserveReply::decode(&payload).unwrap().address;
    let create = MemCreate {
        new: memory,
        bytes,
        handle_types: 0,
    };
    ready.served.call(3, 1, &create);
    ready.served.call(3, 2, &MemMap { address, memory });
    is_freed_behind_a_graph(ready, &MemUnmap { address, bytes }, "mem_unmap");
}

#[test]
fn pools_give_no_memory_back_while_a_graph_is_being_made() {
    let mut ready = ready();
    let pool = handle(1);
    let create = PoolCreate {
        new: pool,
        handle_types: 0,
        most: 0,
    };
    ready.served.call(1, 1, &create);
    ready.begin_graph();
    ready.served.ask(1, 2, &PoolTrim { pool, keep: 0 });
    ready.served.ask(3, 1, &PoolDestroy { pool });
    // The pool is no longer the guest's.
    assert_eq!(ready.status(&PoolTrim { pool, keep: 0 }), INVALID_HANDLE);
    for call in ["pool_trim", "pool_destroy"] {
        assert!(!ready.device.comes_at_once(call, 1), "{call}");
    }
    ready.device.let_go("instantiate");
    for (slot, sequence) in [(2, 1), (1, 2), (3, 1)] {
        assert_eq!(ready.served.answer(slot, sequence).0, 0);
    }
    for call in ["pool_trim", "pool_destroy"] {
        assert_eq!(ready.device.arrivals(call), 1, "{call}");
    }
}
