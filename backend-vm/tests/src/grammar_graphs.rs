//! Valid records of graphs.

use wormhole_api::{
    Element, GraphBegin, GraphBody, GraphCondition, GraphConditional, GraphCopy, GraphDestroy,
    GraphEdge, GraphEdges, GraphEmpty, GraphEnable, GraphEvent, GraphFill, GraphInstantiate,
    GraphKernel, GraphLaunch, GraphMemory, GraphUpdate, GraphUpload, Items, MemoryOperation,
};

use crate::attack::Entry;
use crate::grammar::{Example, Source, entry};

/// Returns records of a graph with a node of every kind, from its description to its destruction, and of another one
/// that is updated.
pub fn graphs(source: &mut Source<'_>) -> Vec<Entry> {
    let begin = GraphBegin::example(source);
    let graph = begin.new;
    let address = source.device().0;
    macro_rules! of_graph {
        ($message:ident $(, $field:ident: $value:expr)*) => {
            entry(&$message { graph, $($field: $value,)* ..Example::example(source) })
        };
    }
    vec![
        entry(&begin),
        of_graph!(GraphKernel, parameters: &address.to_le_bytes()),
        of_graph!(GraphCopy),
        of_graph!(GraphFill),
        entry(&GraphMemory {
            graph,
            operations: Items::new(&[MemoryOperation {
                kind: 2,
                flags: 0,
                address,
                value: 7,
            }]),
        }),
        of_graph!(GraphEvent),
        entry(&GraphEmpty { graph }),
        entry(&GraphEdges {
            graph,
            edges: Items::new(&[GraphEdge {
                from: 0,
                to: 5,
                data: 0,
            }]),
        }),
        of_graph!(GraphCondition),
        of_graph!(GraphConditional),
        of_graph!(GraphBody),
        of_graph!(GraphFill, pitch: 0, height: 1, element: Element::Byte),
        of_graph!(GraphInstantiate),
        of_graph!(GraphLaunch),
        of_graph!(GraphUpload),
        of_graph!(GraphEnable),
        entry(&GraphDestroy { graph }),
    ]
    .into_iter()
    .chain(updates(source))
    .collect()
}

/// Returns records of an empty graph that is updated by another one.
fn updates(source: &mut Source<'_>) -> Vec<Entry> {
    let [begin, next] = [(); 2].map(|()| GraphBegin::example(source));
    let graph = begin.new;
    vec![
        entry(&begin),
        entry(&GraphInstantiate { graph, flags: 0 }),
        entry(&next),
        entry(&GraphUpdate {
            graph,
            from: next.new,
        }),
        entry(&GraphDestroy { graph }),
    ]
}
