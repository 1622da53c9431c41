//! Lists of dependencies.

use std::ops::{Deref, DerefMut};

use super::Edge;

/// Dependencies of a node. Most have one, which is stored in place: captures add a node for every launch.
#[derive(Clone, Debug)]
pub enum Edges {
    One(Edge),
    Any(Vec<Edge>),
}

impl Edges {
    pub fn push(&mut self, edge: Edge) {
        match self {
            Self::One(first) => *self = Self::Any(vec![*first, edge]),
            Self::Any(edges) if edges.capacity() == 0 => *self = Self::One(edge),
            Self::Any(edges) => edges.push(edge),
        }
    }

    pub fn retain(&mut self, is_kept: impl FnMut(&Edge) -> bool) {
        let mut edges = match self {
            Self::One(edge) => vec![*edge],
            Self::Any(edges) => std::mem::take(edges),
        };
        edges.retain(is_kept);
        *self = Self::Any(edges);
    }
}

impl Default for Edges {
    fn default() -> Self {
        Self::Any(Vec::new())
    }
}

impl Deref for Edges {
    type Target = [Edge];

    fn deref(&self) -> &[Edge] {
        match self {
            Self::One(edge) => std::slice::from_ref(edge),
            Self::Any(edges) => edges,
        }
    }
}

impl DerefMut for Edges {
    fn deref_mut(&mut self) -> &mut [Edge] {
        match self {
            Self::One(edge) => std::slice::from_mut(edge),
            Self::Any(edges) => edges,
        }
    }
}

impl From<Vec<Edge>> for Edges {
    fn from(edges: Vec<Edge>) -> Self {
        Self::Any(edges)
    }
}

impl FromIterator<Edge> for Edges {
    fn from_iter<I: IntoIterator<Item = Edge>>(edges: I) -> Self {
        Self::Any(edges.into_iter().collect())
    }
}

impl<'a> IntoIterator for &'a Edges {
    type Item = &'a Edge;
    type IntoIter = std::slice::Iter<'a, Edge>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wormhole_api::handle::Key;

    use super::*;
    use crate::graph::NodeHandle;
    use crate::types::CUgraphEdgeData;

    fn node(index: u32) -> NodeHandle {
        let generation = 1;
        NodeHandle::new(Key { index, generation }).unwrap()
    }

    proptest! {
        #[test]
        fn dependencies_are_those_of_a_list(
            changes in prop::collection::vec((any::<bool>(), 0..4_u32), 0..12)
        ) {
            let mut edges = Edges::default();
            let mut wanted: Vec<NodeHandle> = Vec::new();
            for (adds, index) in changes {
                let node = node(index);
                if adds {
                    let data = CUgraphEdgeData::default();
                    edges.push(Edge { node, data });
                    wanted.push(node);
                } else {
                    edges.retain(|edge| edge.node != node);
                    wanted.retain(|other| *other != node);
                }
                let found: Vec<NodeHandle> = edges.iter().map(|edge| edge.node).collect();
                prop_assert_eq!(&found, &wanted);
                let copy: Edges = edges.iter().copied().collect();
                prop_assert_eq!(copy.len(), wanted.len());
            }
        }
    }
}
