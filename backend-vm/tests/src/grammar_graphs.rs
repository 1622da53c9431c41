//! Valid records of graphs.

use wormhole_api::{
    DevicePtr, Element, GraphBegin, GraphBody, GraphBranch, GraphCondition, GraphConditional,
    GraphCopy, GraphDestroy, GraphEdge, GraphEdges, GraphEmpty, GraphEnable, GraphEvent,
    GraphEventKind, GraphFill, GraphInstantiate, GraphKernel, GraphLaunch, GraphMemory,
    GraphUpdate, GraphUpload, Items, MemoryOperation,
};

use crate::attack::Entry;
use crate::grammar::{ARRAY, Things, entry};
use crate::guest::Guest;

/// Returns records of a graph with a node of every kind, from its description to its destruction.
pub fn graphs(things: &Things, guest: &mut Guest) -> Vec<Entry> {
    let Things {
        stream,
        event,
        function,
        array,
        device,
        ..
    } = *things;
    let [width, height] = ARRAY;
    let (graph, from) = (guest.mint(), guest.mint());
    vec![
        entry(&GraphBegin { new: graph }),
        entry(&GraphKernel {
            graph,
            function,
            grid: [2, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            attributes: Items::new(&[]),
            parameters: &device.0.to_le_bytes(),
        }),
        entry(&GraphCopy {
            graph,
            extent: [width / 2, height / 2, 1],
            to_array: Some(array),
            to_origin: [3, 2, 0],
            to_memory: DevicePtr(0),
            to_pitch: 0,
            to_rows: 0,
            from_array: None,
            from_origin: [0; 3],
            from_memory: device,
            from_pitch: width,
            from_rows: height,
        }),
        entry(&GraphFill {
            graph,
            destination: device,
            pitch: 256,
            width: 16,
            height: 4,
            value: 3,
            element: Element::Word,
        }),
        entry(&GraphMemory {
            graph,
            operations: Items::new(&[MemoryOperation {
                kind: 2,
                flags: 0,
                address: device.0,
                value: 7,
            }]),
        }),
        entry(&GraphEvent {
            graph,
            event,
            kind: GraphEventKind::Record,
        }),
        entry(&GraphEmpty { graph }),
        entry(&GraphEdges {
            graph,
            edges: Items::new(&[GraphEdge {
                from: 0,
                to: 5,
                data: 0,
            }]),
        }),
        entry(&GraphCondition {
            graph,
            default: 2,
            assigned: 1,
        }),
        entry(&GraphConditional {
            graph,
            condition: 1,
            branch: GraphBranch::Switch,
            bodies: 3,
        }),
        entry(&GraphBody { graph, body: 3 }),
        entry(&GraphFill {
            graph,
            destination: device,
            pitch: 0,
            width: 16,
            height: 1,
            value: 4,
            element: Element::Byte,
        }),
        entry(&GraphInstantiate { graph, flags: 0 }),
        entry(&GraphLaunch { graph, stream }),
        entry(&GraphUpload { graph, stream }),
        entry(&GraphEnable {
            graph,
            node: 0,
            enabled: 0,
        }),
        entry(&GraphBegin { new: from }),
        entry(&GraphUpdate { graph, from }),
        entry(&GraphDestroy { graph }),
    ]
}
