//! Conditional nodes of executable graphs.

use std::sync::atomic::Ordering;

use super::graphs::{
    RESULT, chain, copy, fill, graph, instantiate, new_stream, one_thread, result, run,
};
use super::{
    Check, HostMemory, ONE_THREAD, Outcome, function, kernel, kernels, launch, load, same, worked,
};
use crate::{
    Condition, Conditional, CuError, Device, GraphBranch, GraphDescription, GraphNode,
    LoadedFunction,
};

pub const CHECKS: &[Check] = &[
    Check {
        name: "the body of a loop is run until a kernel in it ends it, at every launch",
        run: loops,
    },
    Check {
        name: "a condition chooses one of two bodies",
        run: either,
    },
    Check {
        name: "a condition chooses one of many bodies, or none",
        run: switch,
    },
    Check {
        name: "a condition that has a default has it at every launch",
        run: default,
    },
    Check {
        name: "bodies lie in each other",
        run: nested,
    },
    Check {
        name: "an update changes defaults and what bodies do, and not which body is run when",
        run: update,
    },
    Check {
        name: "a kernel that no graph runs has no conditions",
        run: outside,
    },
];

/// Word in which the host stores the choice.
const CHOICE: usize = 16;

fn of_conditions(device: &dyn Device, name: &str) -> Result<LoadedFunction, String> {
    function(device, &load(device, kernels::CONDITIONS)?, name)
}

fn assigned(default: u32) -> Condition {
    Condition {
        default,
        assigned: true,
    }
}

const UNASSIGNED: Condition = Condition {
    default: 0,
    assigned: false,
};

fn conditional(condition: u32, branch: GraphBranch, first: u32, bodies: u32) -> GraphNode {
    GraphNode::Conditional(Conditional {
        condition,
        branch,
        first,
        bodies,
    })
}

/// Describes a graph; each node comes with the number of its body.
fn described(
    conditions: &[Condition],
    nodes: Vec<(u32, GraphNode)>,
    edges: &[(u32, u32)],
) -> GraphDescription {
    let (bodies, nodes) = nodes.into_iter().unzip();
    GraphDescription {
        conditions: conditions.to_vec(),
        bodies,
        ..graph(nodes, edges)
    }
}

fn loops(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let (lower, add_one) = (of_conditions(device, "lower")?, kernel(device, "add_one")?);
    let (left, one, other) = (memory, memory + 64, memory + 128);
    // Two branches in the body, which join.
    let nodes = vec![
        (0, fill(left, 5)),
        (0, fill(one, 0)),
        (0, conditional(0, GraphBranch::While, 1, 1)),
        (0, copy(host.address(RESULT), one)),
        (1, one_thread(&add_one, &[one])),
        (1, copy(other, one)),
        (1, one_thread(&lower, &[1, left, u64::from(u32::MAX)])),
        (1, copy(one, other)),
    ];
    let edges = [(0, 1), (1, 2), (2, 3), (4, 5), (5, 7), (6, 7)];
    let executable = instantiate(device, &described(&[assigned(1)], nodes, &edges))?;
    let stream = new_stream(device)?;
    for _ in 0..3 {
        host.half_word(RESULT).store(0, Ordering::Release);
        run(device, executable, stream)?;
        same("rounds of the loop", result(&host), 5)?;
    }
    worked("destroy_graph", device.destroy_graph(executable))
}

/// Describes a graph that counts in memory which bodies a condition selects.
fn choosing(
    device: &dyn Device,
    host: &HostMemory<'_>,
    memory: u64,
    branch: GraphBranch,
    bodies: u32,
) -> Result<GraphDescription, String> {
    let (decide, add_one) = (of_conditions(device, "decide")?, kernel(device, "add_one")?);
    let mut nodes = vec![
        (0, one_thread(&decide, &[1, host.address(CHOICE * 4)])),
        (0, conditional(0, branch, 1, bodies)),
    ];
    for body in 0..bodies {
        let counter = memory + u64::from(body) * 4;
        nodes.push((1 + body, one_thread(&add_one, &[counter])));
    }
    Ok(described(&[UNASSIGNED], nodes, &[(0, 1)]))
}

/// Launches a graph once for each choice. Returns the number of runs of each body.
fn counts<const BODIES: usize>(
    device: &dyn Device,
    branch: GraphBranch,
    choices: &[u32],
) -> Result<[u32; BODIES], String> {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let stream = new_stream(device)?;
    let clear = chain(
        (0..BODIES as u64)
            .map(|body| fill(memory + body * 4, 0))
            .collect(),
    );
    run(device, instantiate(device, &clear)?, stream)?;
    let bodies = u32::try_from(BODIES).unwrap_or(0);
    let executable = choosing(device, &host, memory, branch, bodies)?;
    let executable = instantiate(device, &executable)?;
    for choice in choices {
        host.half_word(CHOICE).store(*choice, Ordering::Release);
        run(device, executable, stream)?;
    }
    let mut counts = [0; BODIES];
    for (count, address) in counts.iter_mut().zip((memory..).step_by(4)) {
        let read = chain(vec![copy(host.address(RESULT), address)]);
        run(device, instantiate(device, &read)?, stream)?;
        *count = result(&host);
    }
    Ok(counts)
}

fn either(device: &dyn Device) -> Outcome {
    let found = counts(device, GraphBranch::If, &[1, 0, u32::MAX, 0, 1 << 31])?;
    same("runs of the two bodies", found, [3, 2])?;
    let found = counts(device, GraphBranch::If, &[0, 2, 0])?;
    same("runs of the only body", found, [1])
}

fn switch(device: &dyn Device) -> Outcome {
    let found = counts(device, GraphBranch::Switch, &[2, 0, 1, 2, 3, 4, u32::MAX])?;
    same("runs of each body", found, [1, 1, 2, 1])
}

fn default(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let (lower, add_one) = (of_conditions(device, "lower")?, kernel(device, "add_one")?);
    // The body clears the condition, whose default applies to the next launch.
    let nodes = vec![
        (0, conditional(0, GraphBranch::If, 1, 1)),
        (0, copy(host.address(RESULT), memory)),
        (1, one_thread(&add_one, &[memory])),
        (1, one_thread(&lower, &[1, memory + 64, 0])),
    ];
    let edges = [(0, 1), (2, 3)];
    let executable = instantiate(device, &described(&[assigned(9)], nodes, &edges))?;
    let stream = new_stream(device)?;
    let clear = instantiate(device, &chain(vec![fill(memory, 0)]))?;
    run(device, clear, stream)?;
    for round in 1..=3 {
        run(device, executable, stream)?;
        same("launches that ran the body", result(&host), round)?;
    }
    Ok(())
}

fn nested(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let (lower, decide) = (
        of_conditions(device, "lower")?,
        of_conditions(device, "decide")?,
    );
    let add_one = kernel(device, "add_one")?;
    let (outer, inner, count) = (memory, memory + 64, memory + 128);
    // Each round of the outer loop sets up an inner loop of as many rounds as remain; the last has none.
    let nodes = vec![
        (0, fill(outer, 4)),
        (0, fill(count, 0)),
        (0, conditional(0, GraphBranch::While, 1, 1)),
        (1, one_thread(&lower, &[1, outer, u64::from(u32::MAX)])),
        (1, copy(inner, outer)),
        (1, one_thread(&decide, &[2, inner])),
        (1, conditional(1, GraphBranch::While, 2, 1)),
        (2, one_thread(&add_one, &[count])),
        (2, one_thread(&lower, &[2, inner, u64::from(u32::MAX)])),
        (0, copy(host.address(RESULT), count)),
    ];
    let edges = [(0, 1), (1, 2), (3, 4), (4, 5), (5, 6), (7, 8), (2, 9)];
    let conditions = [assigned(1), UNASSIGNED];
    let executable = instantiate(device, &described(&conditions, nodes, &edges))?;
    let stream = new_stream(device)?;
    for _ in 0..2 {
        run(device, executable, stream)?;
        same("rounds of the inner loop", result(&host), 3 + 2 + 1)?;
    }
    Ok(())
}

fn update(device: &dyn Device) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let described = |default: u32, branch: GraphBranch, values: [u32; 2]| {
        let nodes = vec![
            (0, conditional(0, branch, 1, 2)),
            (0, copy(host.address(RESULT), memory)),
            (1, fill(memory, values[0])),
            (2, fill(memory, values[1])),
        ];
        described(&[assigned(default)], nodes, &[(0, 1)])
    };
    let executable = instantiate(device, &described(1, GraphBranch::If, [3, 4]))?;
    let stream = new_stream(device)?;
    run(device, executable, stream)?;
    same("the word before an update", result(&host), 3)?;
    for (default, values, expected) in [(0, [5, 6], 6), (1, [7, 8], 7)] {
        let updated = device.update_graph(executable, &described(default, GraphBranch::If, values));
        worked("update_graph", updated)?;
        run(device, executable, stream)?;
        same("the word after an update", result(&host), expected)?;
    }
    let other = device.update_graph(executable, &described(0, GraphBranch::Switch, [9, 10]));
    let failed = Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
    same("an update to another choice", other, failed)?;
    run(device, executable, stream)?;
    same("the word after a failed update", result(&host), 7)
}

fn outside(device: &dyn Device) -> Outcome {
    let memory = worked("allocate", device.mem_alloc(4096))?;
    let lower = of_conditions(device, "lower")?;
    let stream = new_stream(device)?;
    let launched = launch(device, stream, &lower, ONE_THREAD, &[1, memory, 1]);
    worked("launch", launched)?;
    let ended = device.synchronize_stream(stream);
    same("the kernel's end", ended, Err(CuError::ILLEGAL_ADDRESS))
}
