//! Stream capture: turns work that is handed to a stream into nodes of a graph.
//!
//! A stream that is being captured has a mark, which every call checks; the other state is in the model of
//! [`graph`](crate::graph). The legacy stream has the mark while any blocking stream is being captured: its work would
//! have to wait for that stream.
//!
//! [`capture_mode`] defines which other calls are forbidden and end captures.

mod nodes;

use wormhole_api::Handle;
use wormhole_api::constants::capture_mode::RELAXED;
use wormhole_api::constants::capture_status::{ACTIVE, INVALIDATED, NONE};
use wormhole_api::constants::graph_dependency_type::PROGRAMMATIC;
use wormhole_api::handle::{Event, Stream};

pub use self::nodes::take;
use crate::error::{CuError, Result};
use crate::graph::work::Work;
use crate::graph::{Edge, Edges, GraphHandle, Model, NodeHandle, with};
use crate::handle::{HandleMap, to_pointer};
use crate::object::capture_mode::{self, UnderWay};
use crate::object::event;
use crate::object::stream::{self, Target};
use crate::types::{CUgraphEdgeData, CUgraphNode, CUstreamCaptureMode, CUstreamCaptureStatus};

/// One capture, from its begin to its end.
#[derive(Debug)]
struct Capture {
    graph: GraphHandle,
    /// True if the graph was created for the capture.
    owns: bool,
    origin: Handle<Stream>,
    under_way: UnderWay,
    /// Streams of the capture, also those that have been destroyed since.
    streams: Vec<Handle<Stream>>,
}

/// State of a stream in its capture.
#[derive(Debug, Default)]
struct Tail {
    capture: u64,
    before: Edges,
    /// Node of the stream's last work, unless the program has replaced the stream's dependencies since.
    own: Option<NodeHandle>,
    /// Arrays of the stream's last `cuStreamGetCaptureInfo`.
    shown: Shown,
}

/// Arrays to which a program has pointers.
#[derive(Debug, Default)]
struct Shown {
    nodes: Vec<usize>,
    data: Vec<CUgraphEdgeData>,
}

/// Position at which an event was recorded in a capture. It outlives the event's next record and the event itself; the
/// event stores whether this was its last record.
#[derive(Clone, Debug)]
struct Recorded {
    capture: u64,
    before: Edges,
}

/// All captures of the process.
#[derive(Debug, Default)]
pub struct Captures {
    last: u64,
    live: HandleMap<u64, Capture>,
    tails: HandleMap<Handle<Stream>, Tail>,
    events: HandleMap<Handle<Event>, Recorded>,
}

/// Result of `cuStreamGetCaptureInfo`.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    pub id: u64,
    pub graph: GraphHandle,
    pub nodes: *const CUgraphNode,
    pub data: *const CUgraphEdgeData,
    pub count: usize,
    /// True if no dependency has a port or a type other than the default.
    pub plain: bool,
}

/// Ends the captures of a thread's per-thread default streams when the thread ends.
struct ThreadEnd;

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        stream::destroy_of_thread();
        end_orphaned();
    }
}

thread_local! {
    static THREAD_END: ThreadEnd = const { ThreadEnd };
}

/// Refuses a query of a captured stream, or a wait for it.
#[inline]
pub fn check_wait(target: Target) -> Result {
    check_work(target)?;
    capture_mode::check_call()
}

/// Refuses work that a graph cannot contain, if the stream is captured.
#[inline]
pub fn check_work(target: Target) -> Result {
    if target.is_captured() {
        return Err(refuse(target, CuError::STREAM_CAPTURE_UNSUPPORTED));
    }
    Ok(())
}

/// Refuses to destroy the origin stream of a capture, since only it can end the capture. CUDA forbids that too. The
/// capture's other streams may be destroyed, as NCCL does.
pub fn check_destroy(target: Target) -> Result {
    let begins = |model: &mut Model| {
        let capture = model.capture_of(target)?;
        Ok(model.captures.live[&capture].origin == target.handle)
    };
    if target.is_captured() && with(begins).unwrap_or(false) {
        return check_work(target);
    }
    Ok(())
}

/// Invalidates the capture of a stream after a call that it does not allow; returns the call's error.
#[cold]
fn refuse(target: Target, code: CuError) -> CuError {
    let refused: Result = with(|model| {
        let capture = model.capture_of(target)?;
        model.captures.invalidate(capture);
        Err(code)
    });
    refused.err().unwrap_or(code)
}

impl Captures {
    fn invalidate(&self, capture: u64) {
        if let Some(capture) = self.live.get(&capture) {
            capture.under_way.invalidate();
        }
    }

    /// Returns the capture of a stream, which must be valid, and the stream's state in it.
    fn valid(&self, target: Target) -> Result<(&Capture, &Tail)> {
        if target.handle.is_legacy() {
            return Err(self.implicit());
        }
        let tail = self.tails.get(&target.handle);
        let tail = tail.ok_or(CuError::ILLEGAL_STATE)?;
        match self.live.get(&tail.capture) {
            Some(capture) if capture.under_way.is_valid() => Ok((capture, tail)),
            _ => Err(CuError::STREAM_CAPTURE_INVALIDATED),
        }
    }

    /// Invalidates all captures of blocking streams, because the legacy stream was used.
    fn implicit(&self) -> CuError {
        for capture in self.live.values() {
            let is_blocking = |stream: &Handle<Stream>| {
                stream::existing(*stream).is_ok_and(|target| target.stream.is_blocking())
            };
            if capture.streams.iter().any(is_blocking) {
                capture.under_way.invalidate();
            }
        }
        CuError::STREAM_CAPTURE_IMPLICIT
    }

    /// Adds a stream to a capture.
    fn join(&mut self, id: u64, target: Target, before: Edges) {
        if let Some(capture) = self.live.get_mut(&id) {
            capture.streams.push(target.handle);
            target.mark_captured();
            let tail = Tail {
                capture: id,
                before,
                ..Tail::default()
            };
            self.tails.insert(target.handle, tail);
        }
    }

    /// Ends a capture, and removes its streams from it.
    fn end(&mut self, id: u64) -> Option<Capture> {
        let capture = self.live.remove(&id)?;
        self.events.retain(|_, recorded| recorded.capture != id);
        for stream in &capture.streams {
            self.tails.remove(stream);
            stream::release_captured(*stream);
        }
        Some(capture)
    }
}

impl Model {
    /// Returns the capture of a stream, which must be valid.
    fn capture_of(&mut self, target: Target) -> Result<u64> {
        self.captures.valid(target).map(|(_, tail)| tail.capture)
    }

    /// Adds a node for work of a stream.
    fn captured(&mut self, target: Target, work: Work) -> Result<NodeHandle> {
        let (capture, tail) = self.captures.valid(target)?;
        let graph = capture.graph;
        let mut before = tail.before.clone();
        if !matches!(work, Work::Kernel(_)) {
            // Only kernels can begin early.
            let early = before
                .iter_mut()
                .filter(|edge| edge.data.r#type == PROGRAMMATIC);
            early.for_each(|edge| edge.data = CUgraphEdgeData::default());
        }
        let node = self.add(graph, before, work)?;
        if let Some(tail) = self.captures.tails.get_mut(&target.handle) {
            tail.before = Edges::One(edge(node));
            tail.own = Some(node);
        }
        Ok(node)
    }

    /// Implements `cuStreamBeginCapture`, into a new graph or an existing one.
    pub fn begin_capture(
        &mut self,
        target: Target,
        into: Option<(GraphHandle, Vec<Edge>)>,
        mode: CUstreamCaptureMode,
    ) -> Result {
        if target.handle.is_legacy() {
            return Err(CuError::STREAM_CAPTURE_UNSUPPORTED);
        }
        if mode > RELAXED {
            return Err(CuError::INVALID_VALUE);
        }
        if target.is_captured() {
            return Err(CuError::ILLEGAL_STATE);
        }
        let (graph, before, owns) = match into {
            Some((graph, before)) => {
                self.check_dependencies(graph, &before)?;
                (graph, before.into(), false)
            }
            None => (self.create()?, Edges::default(), true),
        };
        let captures = &mut self.captures;
        captures.last += 1;
        let id = captures.last;
        let capture = Capture {
            graph,
            owns,
            origin: target.handle,
            under_way: UnderWay::begin(mode),
            streams: Vec::new(),
        };
        captures.live.insert(id, capture);
        captures.join(id, target, before);
        // The first use registers the destructor. A thread that already runs its destructors needs no other.
        let _ = THREAD_END.try_with(|_| ());
        Ok(())
    }

    /// Implements `cuStreamEndCapture`; destroys the capture's own graph unless it is `wanted`.
    pub fn end_capture(&mut self, target: Target, wanted: bool) -> Result<GraphHandle> {
        let tail = self.captures.tails.get(&target.handle);
        let id = tail.ok_or(CuError::ILLEGAL_STATE)?.capture;
        let capture = self.captures.live.get(&id).ok_or(CuError::UNKNOWN)?;
        if capture.origin != target.handle {
            let error = match capture.under_way.is_valid() {
                true => CuError::STREAM_CAPTURE_UNMATCHED,
                false => CuError::STREAM_CAPTURE_INVALIDATED,
            };
            capture.under_way.invalidate();
            return Err(error);
        }
        let result = if !capture.under_way.is_valid() {
            Err(CuError::STREAM_CAPTURE_INVALIDATED)
        } else if !capture.under_way.may_end_here() {
            Err(CuError::STREAM_CAPTURE_WRONG_THREAD)
        } else if !self.is_joined(id, target.handle) {
            Err(CuError::STREAM_CAPTURE_UNJOINED)
        } else {
            Ok(())
        };
        let ended = self.captures.end(id).ok_or(CuError::UNKNOWN)?;
        if (result.is_err() || !wanted) && ended.owns {
            // The program may have destroyed it already.
            let _ = self.destroy(ended.graph);
        }
        result.map(|()| ended.graph)
    }

    /// Returns true if the last work of all other streams of a capture precedes the present position of its origin.
    /// Dependencies that the program itself set or removed (CUDA driver API, `cuStreamUpdateCaptureDependencies`) need
    /// not; NCCL leaves nodes of its own unjoined so.
    fn is_joined(&self, id: u64, origin: Handle<Stream>) -> bool {
        let capture = &self.captures.live[&id];
        let last = &self.captures.tails[&origin].before;
        let is_last = |node: &NodeHandle| last.iter().any(|edge| edge.node == *node);
        let others = capture.streams.iter();
        let own = others.filter_map(|stream| self.captures.tails.get(stream)?.own);
        // A capture of one stream has none of these.
        let earlier: Vec<NodeHandle> = own.filter(|node| !is_last(node)).collect();
        earlier.is_empty() || self.all_before(&earlier, last)
    }

    /// Implements `cuStreamIsCapturing`.
    pub fn capture_status(&self, target: Target) -> Result<CUstreamCaptureStatus> {
        if target.handle.is_legacy() {
            return match target.is_captured() {
                true => Err(CuError::STREAM_CAPTURE_IMPLICIT),
                false => Ok(NONE),
            };
        }
        let tail = self.captures.tails.get(&target.handle);
        let capture = tail.and_then(|tail| self.captures.live.get(&tail.capture));
        Ok(
            capture.map_or(NONE, |capture| match capture.under_way.is_valid() {
                true => ACTIVE,
                false => INVALIDATED,
            }),
        )
    }

    /// Implements `cuStreamGetCaptureInfo` for an active capture. The pointers are valid until the stream's next call.
    pub fn capture_info(&mut self, target: Target) -> Result<Info> {
        let tail = self.captures.tails.get_mut(&target.handle);
        let tail = tail.ok_or(CuError::ILLEGAL_STATE)?;
        let capture = self.captures.live.get(&tail.capture);
        let capture = capture.ok_or(CuError::ILLEGAL_STATE)?;
        let nodes = tail.before.iter().map(|edge| to_pointer(edge.node).addr());
        tail.shown = Shown {
            nodes: nodes.collect(),
            data: tail.before.iter().map(|edge| edge.data).collect(),
        };
        let is_plain = |data: &CUgraphEdgeData| data.from_port == 0 && data.r#type == 0;
        Ok(Info {
            id: tail.capture,
            graph: capture.graph,
            nodes: tail.shown.nodes.as_ptr().cast(),
            data: tail.shown.data.as_ptr(),
            count: tail.shown.nodes.len(),
            plain: tail.shown.data.iter().all(is_plain),
        })
    }

    /// Implements `cuStreamUpdateCaptureDependencies`.
    pub fn set_capture_dependencies(
        &mut self,
        target: Target,
        before: Vec<Edge>,
        adds: bool,
    ) -> Result {
        let id = self.capture_of(target)?;
        let graph = self.captures.live[&id].graph;
        self.check_dependencies(graph, &before)?;
        if let Some(tail) = self.captures.tails.get_mut(&target.handle) {
            match adds {
                true => add_missing(&mut tail.before, &before),
                false => (tail.before, tail.own) = (before.into(), None),
            }
        }
        Ok(())
    }

    /// Implements `cuEventRecord` in a stream that is being captured.
    fn record_captured(&mut self, target: Target, event: Handle<Event>) -> Result {
        let capture = self.capture_of(target)?;
        let before = self.captures.tails[&target.handle].before.clone();
        let recorded = Recorded { capture, before };
        self.captures.events.insert(event, recorded);
        Ok(())
    }

    /// Implements `cuStreamWaitEvent` with an event that was recorded in a capture: the stream joins the capture.
    fn wait_captured(&mut self, target: Target, event: Handle<Event>) -> Result {
        let recorded = self.captures.events.get(&event).cloned();
        let Recorded { capture, before } = recorded.ok_or(CuError::INVALID_VALUE)?;
        // An event of an ended capture is `INVALID_VALUE`.
        let live = self.captures.live.get(&capture);
        let is_valid = live.ok_or(CuError::INVALID_VALUE)?.under_way.is_valid();
        if target.handle.is_legacy() {
            self.captures.invalidate(capture);
            return Err(self.captures.implicit());
        }
        if !is_valid {
            return Err(CuError::STREAM_CAPTURE_INVALIDATED);
        }
        if !target.is_captured() {
            self.captures.join(capture, target, before);
            return Ok(());
        }
        let own = self.capture_of(target)?;
        if own != capture {
            self.captures.invalidate(own);
            self.captures.invalidate(capture);
            return Err(CuError::STREAM_CAPTURE_MERGE);
        }
        if let Some(tail) = self.captures.tails.get_mut(&target.handle) {
            add_missing(&mut tail.before, &before);
        }
        Ok(())
    }
}

fn edge(node: NodeHandle) -> Edge {
    Edge {
        node,
        data: CUgraphEdgeData::default(),
    }
}

/// Adds dependencies. Two different dependencies on one node become a plain one, which is as strong as both.
fn add_missing(edges: &mut Edges, more: &[Edge]) {
    let known: HandleMap<NodeHandle, usize> = (0..)
        .zip(&*edges)
        .map(|(at, edge)| (edge.node, at))
        .collect();
    for edge in more {
        match known.get(&edge.node) {
            Some(at) if edges[*at].data != edge.data => {
                edges[*at].data = CUgraphEdgeData::default()
            }
            Some(_) => {}
            None => edges.push(*edge),
        }
    }
}

/// Refuses a query of an event, or a wait for it, that a capture does not allow; the call invalidates the capture.
pub fn check_event(event: Handle<Event>) -> Result {
    if event::is_captured(event) {
        return Err(ask(event, true));
    }
    capture_mode::check_call()
}

/// Refuses to return the time of an event that was recorded in a capture.
pub fn check_time(event: Handle<Event>) -> Result {
    match event::is_captured(event) {
        true => Err(ask(event, false)),
        false => Ok(()),
    }
}

/// Returns the error of a query of an event that was recorded in a capture; invalidates the capture if `ends`.
#[cold]
fn ask(event: Handle<Event>, ends: bool) -> CuError {
    let answer: Result = with(|model| {
        let recorded = model.captures.events.get(&event);
        let capture = recorded.map(|recorded| recorded.capture);
        match capture.filter(|capture| model.captures.live.contains_key(capture)) {
            Some(capture) => {
                if ends {
                    model.captures.invalidate(capture);
                }
                Err(CuError::CAPTURED_EVENT)
            }
            None => Err(CuError::INVALID_VALUE),
        }
    });
    answer.err().unwrap_or(CuError::INVALID_VALUE)
}

/// Ends the captures that `ends` selects, and destroys their own graphs.
fn end_those(ends: impl Fn(&Capture) -> bool) {
    let ended = with(|model| {
        let live = model.captures.live.iter();
        let chosen: Vec<u64> = live
            .filter(|(_, capture)| ends(capture))
            .map(|(id, _)| *id)
            .collect();
        for id in chosen {
            if let Some(capture) = model.captures.end(id)
                && capture.owns
            {
                // The program may have destroyed it already.
                let _ = model.destroy(capture.graph);
            }
        }
        Ok(())
    });
    debug_assert!(ended.is_ok());
}

/// Ends the captures whose origin stream was destroyed with its context or thread: no call can end them any more.
pub fn end_orphaned() {
    end_those(|capture| stream::existing(capture.origin).is_err());
}

/// Ends all captures, because their context is destroyed.
pub fn forget_all() {
    end_those(|_| true);
}
