//! Prints a graph as text for Graphviz.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;

use wormhole_api::GraphBranch;
use wormhole_api::constants::graph_debug_flags::{CONDITIONAL_NODE_PARAMS, VERBOSE};

use super::work::Work;
use super::{GraphHandle, Model, NodeHandle};
use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::log;
use crate::object::function;

/// All known flags.
const FLAGS: u32 = (CONDITIONAL_NODE_PARAMS << 1) - 1;

/// Implements `cuGraphDebugDotPrint`: prints a cluster of nodes for each graph.
pub fn print(model: &Model, graph: GraphHandle, flags: u32) -> Result<String> {
    if flags & !FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut text = String::from("digraph dot {\n");
    cluster(model, graph, flags, &mut text)?;
    text.push_str("}\n");
    Ok(text)
}

/// Writes the text to a file that the program names.
pub fn write(path: &CStr, text: &str) -> Result {
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
    std::fs::write(path, text).map_err(|error| {
        log::error_once!("a graph cannot be written to {}: {error}", path.display());
        CuError::OPERATING_SYSTEM
    })
}

fn cluster(model: &Model, handle: GraphHandle, flags: u32, text: &mut String) -> Result {
    let graph = model.graph(handle)?;
    let id = graph.number;
    let numbers = |wanted: NodeHandle| graph.nodes.iter().position(|node| *node == wanted);
    let _ = writeln!(
        text,
        "subgraph cluster_{id} {{\nlabel=\"graph_{id}\" graph[style=\"dashed\"];"
    );
    for (number, node) in graph.nodes.iter().enumerate() {
        let work = &model.node(*node)?.work;
        let (shape, what) = label(work);
        let style = if matches!(work, Work::Kernel(_)) {
            "bold"
        } else {
            "solid"
        };
        let _ = write!(
            text,
            "\"graph_{id}_node_{number}\"[style=\"{style}\" shape=\"{shape}\" label=\"{number}\n{what}\n"
        );
        if flags & VERBOSE != 0 {
            let _ = writeln!(text, "node handle: {:#018X}", to_pointer(*node).addr());
        }
        text.push_str("\"];\n\n");
        if let Work::Child(child) = work {
            cluster(model, *child, flags, text)?;
        }
        if let Work::Conditional(conditional) = work {
            for body in &conditional.bodies {
                cluster(model, *body, flags, text)?;
            }
        }
    }
    for (from, to) in model.edges(handle)? {
        if let (Some(from), Some(to)) = (numbers(from), numbers(to.node)) {
            let _ = writeln!(
                text,
                "\"graph_{id}_node_{from}\" -> \"graph_{id}_node_{to}\";"
            );
        }
    }
    text.push_str("}\n");
    Ok(())
}

/// Returns the shape and the label of a node.
fn label(work: &Work) -> (&'static str, String) {
    match work {
        Work::Kernel(kernel) => {
            let name = function::find(kernel.function).map_or_else(
                |_| "KERNEL".into(),
                |(_, facts)| facts.name.to_string_lossy().into_owned(),
            );
            ("octagon", name)
        }
        Work::Copy(copy) => {
            let size = format!(
                "MEMCPY\n({},{},{})",
                copy.WidthInBytes, copy.Height, copy.Depth
            );
            ("invtrapezium", size)
        }
        Work::Fill(fill) => {
            let bytes = fill.width * fill.elementSize as usize * fill.height;
            ("invtrapezium", format!("MEMSET\n({},{bytes})", fill.value))
        }
        Work::Host(_) => ("rectangle", "HOST".into()),
        Work::Child(_) => ("rectangle", "CHILD_GRAPH".into()),
        Work::Empty => ("rectangle", "EMPTY".into()),
        Work::WaitEvent(_) => ("rectangle", "EVENT_WAIT".into()),
        Work::RecordEvent(_) => ("rectangle", "EVENT_RECORD".into()),
        Work::Alloc(memory) => ("rectangle", format!("MEM_ALLOC\n({})", memory.bytes)),
        Work::Free(_) => ("rectangle", "MEM_FREE".into()),
        Work::Conditional(conditional) => {
            let kind = match conditional.branch {
                GraphBranch::If => "IF",
                GraphBranch::While => "WHILE",
                GraphBranch::Switch => "SWITCH",
            };
            let what = format!("CONDITIONAL\n({kind},{})", conditional.size());
            ("rectangle", what)
        }
        Work::Memory(operations) => (
            "rectangle",
            format!("BATCH_MEM_OP\n({})", operations.given.len()),
        ),
    }
}
