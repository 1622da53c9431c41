//! Executable graphs.

use std::sync::atomic::Ordering;

use super::{
    Check, HostMemory, NON_BLOCKING, Outcome, eventually, function, holds, kernel, kernels, load,
    pack, same, worked,
};
use crate::{
    Copy3dEnd, CuError, Device, Fill, GraphDescription, GraphEdge, GraphKernel, GraphNode,
    LoadedFunction, MemCopy3d, MemoryOperation, MemoryOperationKind, RawGraph, RawStream,
    condition,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "nodes of a graph run in the order of their edges, at every launch",
        run: order,
    },
    Check {
        name: "branches of a graph run at the same time",
        run: branches,
    },
    Check {
        name: "a graph waits for the host in its middle, at every launch",
        run: host,
    },
    Check {
        name: "an update changes what a graph executes, and not its shape",
        run: update,
    },
    Check {
        name: "an update changes where copies of several rows go, and leaves what is disabled so",
        run: update_rows,
    },
    Check {
        name: "an updated graph names no kernel from before, whose module may be unloaded",
        run: update_module,
    },
    Check {
        name: "a disabled node does nothing until it is enabled",
        run: disable,
    },
    Check {
        name: "launches of one graph come one after the other, in any streams",
        run: serial,
    },
    Check {
        name: "a graph records events and waits for them",
        run: events,
    },
    Check {
        name: "a launch goes on when its graph is destroyed",
        run: destroy,
    },
];

/// Indices of 32-bit words of the host memory.
pub(super) const RESULT: usize = 0;
const READY: usize = 16;
const DONE: usize = 32;

pub(super) fn new_stream(device: &dyn Device) -> Result<RawStream, String> {
    worked("create_stream", device.stream_create(NON_BLOCKING, 0))
}

pub(super) fn one_thread(function: &LoadedFunction, values: &[u64]) -> GraphNode {
    GraphNode::Kernel(GraphKernel {
        function: function.function,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        attributes: Vec::new(),
        parameters: pack(function, values),
    })
}

pub(super) fn fill(address: u64, value: u32) -> GraphNode {
    GraphNode::Fill(Fill {
        destination: address,
        pitch: 0,
        width: 1,
        height: 1,
        value,
        element: 4,
    })
}

pub(super) fn copy(to: u64, from: u64) -> GraphNode {
    let end = |address| Copy3dEnd::Memory {
        address,
        pitch: 4,
        rows: 1,
    };
    GraphNode::Copy(MemCopy3d {
        to: end(to),
        from: end(from),
        extent: [4, 1, 1],
    })
}

fn operation(kind: MemoryOperationKind, address: u64, value: u64) -> MemoryOperation {
    MemoryOperation {
        kind,
        flags: condition::GEQ,
        address,
        value,
    }
}

pub(super) fn graph(nodes: Vec<GraphNode>, edges: &[(u32, u32)]) -> GraphDescription {
    let edge = |&(from, to): &(u32, u32)| GraphEdge {
        from,
        to,
        data: [0; 3],
    };
    GraphDescription {
        nodes,
        edges: edges.iter().map(edge).collect(),
        ..GraphDescription::default()
    }
}

/// Describes a graph whose nodes run one after the other.
pub(super) fn chain(nodes: Vec<GraphNode>) -> GraphDescription {
    let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let edges: Vec<_> = (1..count).map(|node| (node - 1, node)).collect();
    graph(nodes, &edges)
}

pub(super) fn instantiate(
    device: &dyn Device,
    graph: &GraphDescription,
) -> Result<RawGraph, String> {
    worked("instantiate", device.instantiate(graph, 0))
}

pub(super) fn run(device: &dyn Device, graph: RawGraph, stream: RawStream) -> Outcome {
    worked("launch_graph", device.launch_graph(graph, stream))?;
    worked("synchronize", device.synchronize_stream(stream))
}

pub(super) fn result(host: &HostMemory<'_>) -> u32 {
    host.half_word(RESULT).load(Ordering::Acquire)
}

fn order(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let add_one = kernel(device, "add_one")?;
    let nodes = vec![
        fill(memory, 5),
        one_thread(&add_one, &[memory]),
        GraphNode::Empty,
        one_thread(&add_one, &[memory]),
        copy(host.address(RESULT), memory),
    ];
    let executable = instantiate(device, &chain(nodes))?;
    let stream = new_stream(device)?;
    worked("upload_graph", device.upload_graph(executable, stream))?;
    same("the word before a launch", result(&host), 0)?;
    for _ in 0..3 {
        host.half_word(RESULT).store(0, Ordering::Release);
        run(device, executable, stream)?;
        same("the word after a launch", result(&host), 7)?;
    }
    worked("destroy_graph", device.destroy_graph(executable))?;
    same(
        "a launch of a graph that is gone",
        device.launch_graph(executable, stream),
        Err(CuError::INVALID_HANDLE),
    )?;
    let nothing = instantiate(device, &graph(Vec::new(), &[]))?;
    run(device, nothing, stream)
}

fn branches(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let meet = kernel(device, "meet")?;
    // Each branch waits for the other's word.
    let nodes = vec![
        fill(memory, 0),
        fill(memory + 128, 0),
        one_thread(&meet, &[memory, memory + 128]),
        one_thread(&meet, &[memory + 128, memory]),
        copy(host.address(RESULT), memory),
    ];
    let edges = [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)];
    let executable = instantiate(device, &graph(nodes, &edges))?;
    let stream = new_stream(device)?;
    run(device, executable, stream)?;
    holds("both branches have met", result(&host) != 0)
}

/// Node that stands for a host function.
fn host_node(host: &HostMemory<'_>) -> GraphNode {
    use MemoryOperationKind::{Wait64, Write64};
    let (ready, done) = (host.address(READY * 4), host.address(DONE * 4));
    GraphNode::Memory(vec![
        operation(Write64, ready, 1),
        operation(Wait64, done, 1),
        operation(Write64, done, 0),
    ])
}

fn host(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let add_one = kernel(device, "add_one")?;
    let nodes = vec![
        fill(memory, 1),
        copy(host.address(RESULT), memory),
        host_node(&host),
        copy(memory, host.address(RESULT)),
        one_thread(&add_one, &[memory]),
        copy(host.address(RESULT), memory),
    ];
    let executable = instantiate(device, &chain(nodes))?;
    let stream = new_stream(device)?;
    const ROUNDS: u32 = 20;
    for _ in 0..ROUNDS {
        worked("launch_graph", device.launch_graph(executable, stream))?;
    }
    let (ready, done) = (host.word(READY / 2), host.word(DONE / 2));
    for round in 0..ROUNDS {
        eventually("it is the host's turn", || {
            ready.load(Ordering::Acquire) == 1
        })?;
        same("the word at the host's turn", result(&host), 1)?;
        same(
            "the stream's readiness",
            device.query_stream(stream),
            Ok(false),
        )?;
        ready.store(0, Ordering::Relaxed);
        host.half_word(RESULT).store(100 + round, Ordering::Release);
        done.store(1, Ordering::Release);
    }
    worked("synchronize", device.synchronize_stream(stream))?;
    same("the word at the end", result(&host), 100 + ROUNDS)?;
    same("what the host wrote", done.load(Ordering::Acquire), 0)
}

fn update(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let store = kernel(device, "store")?;
    let described = |value: u64, address: u64| {
        chain(vec![
            one_thread(&store, &[address, value]),
            copy(host.address(RESULT), address),
        ])
    };
    let executable = instantiate(device, &described(3, memory))?;
    let stream = new_stream(device)?;
    run(device, executable, stream)?;
    same("the word before the update", result(&host), 3)?;
    worked(
        "update_graph",
        device.update_graph(executable, &described(8, memory + 64)),
    )?;
    run(device, executable, stream)?;
    same("the word after the update", result(&host), 8)?;
    let longer = chain(vec![
        one_thread(&store, &[memory, 9]),
        copy(host.address(RESULT), memory),
        GraphNode::Empty,
    ]);
    let failed = Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
    let longer = device.update_graph(executable, &longer);
    same("an update to a longer graph", longer, failed)?;
    let other = chain(vec![fill(memory, 9), copy(host.address(RESULT), memory)]);
    let other = device.update_graph(executable, &other);
    same("an update to nodes of other kinds", other, failed)?;
    host.half_word(RESULT).store(0, Ordering::Release);
    run(device, executable, stream)?;
    same("the word after failed updates", result(&host), 8)
}

fn update_module(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let modules = [load(device, kernels::PLAIN)?, load(device, kernels::PLAIN)?];
    let described = |module, value: u32| {
        let add_one = function(device, module, "add_one")?;
        Ok::<_, String>(chain(vec![
            fill(memory, value),
            one_thread(&add_one, &[memory]),
            copy(host.address(RESULT), memory),
        ]))
    };
    let executable = instantiate(device, &described(&modules[0], 5)?)?;
    let stream = new_stream(device)?;
    run(device, executable, stream)?;
    same("the word before the update", result(&host), 6)?;
    let updated = device.update_graph(executable, &described(&modules[1], 8)?);
    worked("update_graph", updated)?;
    worked("unload", device.unload(modules[0].module))?;
    for (enabled, expected) in [(true, 9), (false, 8), (true, 9)] {
        worked("enable_node", device.enable_node(executable, 1, enabled))?;
        run(device, executable, stream)?;
        same("the word after the update", result(&host), expected)?;
    }
    worked("destroy_graph", device.destroy_graph(executable))?;
    worked("unload", device.unload(modules[1].module))
}

fn update_rows(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let add_one = kernel(device, "add_one")?;
    // Two rows of one word; the check reads the second.
    let described = |value: u64, to: u64| {
        let end = |address, pitch| Copy3dEnd::Memory {
            address,
            pitch,
            rows: 2,
        };
        let rows = MemCopy3d {
            to: end(to, 64),
            from: end(memory, 64),
            extent: [4, 2, 1],
        };
        chain(vec![
            fill(memory + 64, u32::try_from(value).unwrap_or(0)),
            one_thread(&add_one, &[memory + 64]),
            GraphNode::Copy(rows),
            copy(host.address(RESULT), to + 64),
        ])
    };
    let executable = instantiate(device, &described(3, memory + 1024))?;
    let (one, other) = (new_stream(device)?, new_stream(device)?);
    worked("enable_node", device.enable_node(executable, 1, false))?;
    run(device, executable, one)?;
    same("the word before the update", result(&host), 3)?;
    for (round, stream) in [(1, one), (2, other), (3, one)] {
        let to = memory + 1024 + round * 256;
        let updated = device.update_graph(executable, &described(10 * round, to));
        worked("update_graph", updated)?;
        run(device, executable, stream)?;
        same(
            "the word after an update",
            u64::from(result(&host)),
            10 * round,
        )?;
    }
    worked("enable_node", device.enable_node(executable, 1, true))?;
    run(device, executable, other)?;
    same("the word with the kernel", result(&host), 31)?;
    worked("destroy_stream", device.destroy_stream(one))?;
    // New graphs are independent of the first one.
    let next = [50, 60].map(|value| instantiate(device, &described(value, memory + 1024)));
    for (value, next) in [51, 61].into_iter().zip(next) {
        let next = next?;
        run(device, next, other)?;
        same("the word of another graph", result(&host), value)?;
        worked("destroy_graph", device.destroy_graph(next))?;
    }
    run(device, executable, other)?;
    same("the word of the first", result(&host), 31)?;
    worked("destroy_graph", device.destroy_graph(executable))
}

fn disable(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let add_one = kernel(device, "add_one")?;
    let nodes = vec![
        fill(memory, 5),
        one_thread(&add_one, &[memory]),
        copy(host.address(RESULT), memory),
        GraphNode::Empty,
    ];
    let executable = instantiate(device, &chain(nodes))?;
    let stream = new_stream(device)?;
    for (enabled, expected) in [(false, 5), (true, 6)] {
        worked("enable_node", device.enable_node(executable, 1, enabled))?;
        run(device, executable, stream)?;
        same("the word after a launch", result(&host), expected)?;
    }
    worked("enable_node", device.enable_node(executable, 2, false))?;
    host.half_word(RESULT).store(40, Ordering::Release);
    run(device, executable, stream)?;
    same("the word without the copy", result(&host), 40)?;
    for node in [3, 4] {
        same(
            "disabling a node that cannot be",
            device.enable_node(executable, node, false),
            Err(CuError::INVALID_VALUE),
        )?;
    }
    Ok(())
}

fn serial(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let add_one = kernel(device, "add_one")?;
    let streams = [new_stream(device)?, new_stream(device)?];
    let cleared = instantiate(device, &chain(vec![fill(memory, 0)]))?;
    run(device, cleared, streams[0])?;
    // Each launch reads the last one's result: two at a time would lose increments.
    let nodes = vec![
        one_thread(&add_one, &[memory]),
        copy(memory + 64, memory),
        copy(memory, memory + 64),
        copy(host.address(RESULT), memory),
    ];
    let executable = instantiate(device, &chain(nodes))?;
    const LAUNCHES: u32 = 200;
    for round in 0..LAUNCHES {
        let stream = streams[round as usize % 2];
        worked("launch_graph", device.launch_graph(executable, stream))?;
    }
    worked("synchronize", device.synchronize())?;
    same("the word after all launches", result(&host), LAUNCHES)
}

fn events(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let (first, second) = (new_stream(device)?, new_stream(device)?);
    let gate = worked("create_event", device.create_event(0))?;
    let end = worked("create_event", device.create_event(0))?;
    let nodes = vec![
        GraphNode::WaitEvent(gate),
        copy(host.address(RESULT), memory),
        GraphNode::RecordEvent(end),
    ];
    let executable = instantiate(device, &chain(nodes))?;
    // The graph waits for a stream that waits for the host, and another stream waits for the graph.
    let wait = operation(MemoryOperationKind::Wait64, host.address(READY * 4), 1);
    worked("wait", device.memory_operations(first, &[wait]))?;
    let write = Fill {
        destination: memory,
        pitch: 0,
        width: 1,
        height: 1,
        value: 77,
        element: 4,
    };
    worked("fill", device.fill(write, first))?;
    worked("record_event", device.record_event(gate, first, 0))?;
    worked("launch_graph", device.launch_graph(executable, second))?;
    same("the event's readiness", device.query_event(end), Ok(false))?;
    same("the word before the event", result(&host), 0)?;
    host.word(READY / 2).store(1, Ordering::Release);
    worked("synchronize_event", device.synchronize_event(end))?;
    same("the word after the event", result(&host), 77)?;
    let took = worked("elapsed", device.event_elapsed(gate, end))?;
    holds("time does not run backwards", took >= 0.0)
}

fn destroy(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let nodes = vec![
        fill(memory, 12),
        host_node(&host),
        copy(host.address(RESULT), memory),
    ];
    let executable = instantiate(device, &chain(nodes))?;
    let stream = new_stream(device)?;
    worked("launch_graph", device.launch_graph(executable, stream))?;
    worked("destroy_graph", device.destroy_graph(executable))?;
    host.word(DONE / 2).store(1, Ordering::Release);
    worked("synchronize", device.synchronize_stream(stream))?;
    same("the word after the launch", result(&host), 12)
}
