//! Executable graphs: their nodes run in the order of their edges, branches that do not depend on each other
//! at the same time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use wormhole_device::{
    BoxCopy, CuError, Fill, GraphDescription, GraphEdge, GraphKernel, GraphNode, Graphs, Launch,
    MemoryOperation, RawEvent, RawGraph, RawStream, Result,
};

use crate::device::{Context, CpuDevice, extent, run_fill};
use crate::event::Events;
use crate::kernel::{Kernel, Surroundings};
use crate::memory::Use;
use crate::scheduler::{Point, Scheduler, Work};
use crate::stream_memory;

/// Branches of one graph that run at the same time; more take turns.
const LANES: usize = 32;
/// How often a branch that waits for another looks whether the context lives.
const LOOK: Duration = Duration::from_millis(5);

/// A node, ready to run.
#[derive(Clone, Debug)]
enum Step {
    Kernel {
        kernel: Arc<Kernel>,
        cooperative: bool,
        launch: GraphKernel,
    },
    Copy(BoxCopy),
    Fill(Fill),
    Memory(Vec<MemoryOperation>),
    RecordEvent(RawEvent),
    WaitEvent(RawEvent),
    Empty,
}

#[derive(Clone, Debug)]
struct Node {
    step: Step,
    enabled: bool,
    /// Nodes of other lanes that come before it.
    after: Vec<usize>,
}

/// What a graph executes.
#[derive(Clone, Debug)]
struct Plan {
    nodes: Vec<Node>,
    edges: Vec<GraphEdge>,
    /// The nodes of each lane, in order.
    lanes: Vec<Vec<usize>>,
}

#[derive(Debug)]
struct Executable {
    plan: Arc<Plan>,
    /// Where the last launch is complete: the next one comes after it.
    last: Option<Point>,
}

/// The executable graphs of one context.
#[derive(Debug, Default)]
pub struct Executables {
    graphs: Mutex<HashMap<u64, Executable>>,
    next: AtomicU64,
}

impl Executables {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Executable>> {
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts each node behind one that it depends on where it can, on a lane of its own where it cannot.
fn lanes(count: usize, edges: &[GraphEdge]) -> (Vec<Vec<usize>>, Vec<Vec<usize>>) {
    let mut before = vec![Vec::new(); count];
    for edge in edges {
        before[edge.to as usize].push(edge.from as usize);
    }
    let mut lanes: Vec<Vec<usize>> = Vec::new();
    let mut lane_of = vec![0; count];
    for node in 0..count {
        let ends = |lane: &usize| {
            lanes[*lane]
                .last()
                .is_some_and(|last| before[node].contains(last))
        };
        let lane = match before[node].iter().map(|from| lane_of[*from]).find(ends) {
            Some(lane) => lane,
            None if lanes.len() < LANES => {
                lanes.push(Vec::new());
                lanes.len() - 1
            }
            None => node % LANES,
        };
        lane_of[node] = lane;
        lanes[lane].push(node);
    }
    for (node, before) in before.iter_mut().enumerate() {
        before.retain(|from| lane_of[*from] != lane_of[node]);
    }
    (lanes, before)
}

/// One launch of a graph.
struct Run {
    plan: Arc<Plan>,
    around: Surroundings,
    /// The work of each copy.
    copies: HashMap<usize, Mutex<Option<Work>>>,
    /// When each recorded event was reached.
    times: HashMap<usize, Arc<OnceLock<Instant>>>,
    progress: Mutex<Progress>,
    moved: Condvar,
    failed: AtomicBool,
}

struct Progress {
    done: Vec<bool>,
    error: Option<CuError>,
}

impl Run {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> bool {
        self.failed.load(Ordering::Acquire) || self.around.cancel.load(Ordering::Acquire)
    }

    fn all(&self) -> Result<()> {
        match self.plan.lanes.as_slice() {
            [] => {}
            [only] => self.lane(only),
            [first, others @ ..] => thread::scope(|scope| {
                for lane in others {
                    let started = thread::Builder::new()
                        .name("graph".to_owned())
                        .spawn_scoped(scope, || self.lane(lane));
                    if let Err(error) = started {
                        tracing::error!(%error, "no thread for a branch of a graph");
                        self.fail(CuError::OUT_OF_MEMORY);
                    }
                }
                self.lane(first);
            }),
        }
        self.progress().error.map_or(Ok(()), Err)
    }

    fn fail(&self, error: CuError) {
        self.progress().error.get_or_insert(error);
        self.failed.store(true, Ordering::Release);
        // Kernels of other branches are to stop: the context is lost.
        self.around.cancel.store(true, Ordering::Release);
        self.moved.notify_all();
    }

    fn lane(&self, lane: &[usize]) {
        for &index in lane {
            let node = &self.plan.nodes[index];
            let mut progress = self.progress();
            while !node.after.iter().all(|before| progress.done[*before]) && !self.stopped() {
                // The context's end comes without a notice.
                progress = self
                    .moved
                    .wait_timeout(progress, LOOK)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
            drop(progress);
            if self.stopped() {
                self.moved.notify_all();
                return;
            }
            if node.enabled
                && let Err(error) = self.step(index, &node.step)
            {
                self.fail(error);
                return;
            }
            self.progress().done[index] = true;
            if self.plan.lanes.len() > 1 {
                self.moved.notify_all();
            }
        }
    }

    fn step(&self, index: usize, step: &Step) -> Result<()> {
        match step {
            Step::Kernel {
                kernel,
                cooperative,
                launch,
            } => {
                let launch = as_launch(launch, RawStream::LEGACY);
                let work = Arc::clone(kernel).work(&launch, *cooperative, self.around.clone());
                work()
            }
            Step::Copy(_) => {
                let copy = self
                    .copies
                    .get(&index)
                    .and_then(|place| place.lock().unwrap_or_else(PoisonError::into_inner).take());
                copy.map_or(Ok(()), |copy| copy())
            }
            Step::Fill(fill) => {
                run_fill(fill);
                Ok(())
            }
            Step::Memory(operations) => {
                stream_memory::run(operations, || self.stopped());
                Ok(())
            }
            Step::RecordEvent(_) => {
                if let Some(time) = self.times.get(&index) {
                    time.get_or_init(Instant::now);
                }
                Ok(())
            }
            // What the events stand for came before the launch.
            Step::WaitEvent(_) | Step::Empty => Ok(()),
        }
    }
}

fn as_launch(kernel: &GraphKernel, stream: RawStream) -> Launch<'_> {
    Launch {
        function: kernel.function,
        stream,
        grid: kernel.grid,
        block: kernel.block,
        shared: kernel.shared,
        attributes: &kernel.attributes,
        parameters: &kernel.parameters,
    }
}

impl CpuDevice {
    fn plan(&self, context: &Context, graph: &GraphDescription) -> Result<Plan> {
        let count = graph.nodes.len();
        let known = |edge: &GraphEdge| edge.from < edge.to && (edge.to as usize) < count;
        if !graph.edges.iter().all(known) {
            return Err(CuError::INVALID_VALUE);
        }
        let (lanes, after) = lanes(count, &graph.edges);
        let nodes = graph
            .nodes
            .iter()
            .zip(after)
            .map(|(node, after)| {
                Ok(Node {
                    step: self.prepare(context, node)?,
                    enabled: true,
                    after,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Plan {
            nodes,
            edges: graph.edges.clone(),
            lanes,
        })
    }

    /// The copies of a launch, if all memory that its nodes name is there.
    fn reached(
        &self,
        context: &Context,
        plan: &Plan,
    ) -> Result<HashMap<usize, Mutex<Option<Work>>>> {
        let gone = |_| CuError::ILLEGAL_ADDRESS;
        let mut copies = HashMap::new();
        for (index, node) in plan
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.enabled)
        {
            match &node.step {
                Step::Copy(copy) => {
                    let work = self.copy_work(context, copy).map_err(gone)?;
                    copies.insert(index, Mutex::new(Some(work)));
                }
                Step::Fill(fill) => self
                    .memory
                    .check(fill.destination, extent(fill)?, Use::Write)
                    .map_err(gone)?,
                Step::Memory(operations) => operations
                    .iter()
                    .try_for_each(|operation| stream_memory::check(&self.memory, operation))
                    .map_err(gone)?,
                _ => {}
            }
        }
        Ok(copies)
    }

    fn prepare(&self, context: &Context, node: &GraphNode) -> Result<Step> {
        Ok(match node {
            GraphNode::Kernel(launch) => {
                let kernel = context.modules.kernel(launch.function)?;
                let cooperative = self.validate(&kernel, &as_launch(launch, RawStream::LEGACY))?;
                Step::Kernel {
                    kernel,
                    cooperative,
                    launch: launch.clone(),
                }
            }
            GraphNode::Copy(copy) => {
                self.copy_work(context, copy).map(drop)?;
                Step::Copy(*copy)
            }
            GraphNode::Fill(fill) => {
                self.memory
                    .check(fill.destination, extent(fill)?, Use::Write)?;
                Step::Fill(*fill)
            }
            GraphNode::Memory(operations) => {
                operations
                    .iter()
                    .try_for_each(|operation| stream_memory::check(&self.memory, operation))?;
                Step::Memory(operations.clone())
            }
            GraphNode::RecordEvent(event) => {
                context.events.point(*event)?;
                Step::RecordEvent(*event)
            }
            GraphNode::WaitEvent(event) => {
                context.events.point(*event)?;
                Step::WaitEvent(*event)
            }
            GraphNode::Empty => Step::Empty,
        })
    }
}

/// What a launch waits for beside its stream: the launch before it, and the events that its nodes wait for. An
/// event that the graph itself records is none of them.
fn points(executable: &Executable, events: &Events) -> Result<Vec<Point>> {
    let steps = || executable.plan.nodes.iter().map(|node| &node.step);
    let mut points = Vec::from_iter(executable.last);
    for step in steps() {
        if let Step::WaitEvent(event) = step {
            let recorded =
                steps().any(|other| matches!(other, Step::RecordEvent(same) if same == event));
            if !recorded {
                points.extend(events.point(*event)?);
            }
        }
    }
    Ok(points)
}

impl Graphs for CpuDevice {
    fn instantiate(&self, graph: &GraphDescription, _: u64) -> Result<RawGraph> {
        let context = self.context()?;
        let plan = Arc::new(self.plan(&context, graph)?);
        let executables = &context.graphs;
        let id = executables.next.fetch_add(1, Ordering::Relaxed) + 1;
        executables
            .lock()
            .insert(id, Executable { plan, last: None });
        Ok(RawGraph(id))
    }

    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()> {
        let context = self.context()?;
        let mut plan = self.plan(&context, graph)?;
        let mut graphs = context.graphs.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        let same = |(new, old): (&Node, &Node)| {
            std::mem::discriminant(&new.step) == std::mem::discriminant(&old.step)
        };
        if plan.edges != place.plan.edges
            || plan.nodes.len() != place.plan.nodes.len()
            || !plan.nodes.iter().zip(&place.plan.nodes).all(same)
        {
            return Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
        }
        for (new, old) in plan.nodes.iter_mut().zip(&place.plan.nodes) {
            new.enabled = old.enabled;
        }
        place.plan = Arc::new(plan);
        Ok(())
    }

    fn launch_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        let mut graphs = context.graphs.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        let points = points(place, &context.events)?;
        let plan = Arc::clone(&place.plan);
        let copies = match self.reached(&context, &plan) {
            Ok(copies) => copies,
            Err(error) => {
                // Memory that was freed since: work that reaches it faults.
                let point = context
                    .scheduler
                    .submit(stream, Box::new(move || Err(error)))?;
                place.last = Some(point);
                return Ok(());
            }
        };
        let uses_heap =
            |node: &Node| matches!(&node.step, Step::Kernel { kernel, .. } if kernel.uses_heap());
        let around = self.surroundings(&context, plan.nodes.iter().any(uses_heap));
        let recorded: Vec<(usize, RawEvent, Arc<OnceLock<Instant>>)> = plan
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(index, node)| match node.step {
                Step::RecordEvent(event) => Some((index, event, Arc::default())),
                _ => None,
            })
            .collect();
        let run = Run {
            progress: Mutex::new(Progress {
                done: vec![false; plan.nodes.len()],
                error: None,
            }),
            plan,
            around,
            copies,
            times: recorded
                .iter()
                .map(|(index, _, time)| (*index, Arc::clone(time)))
                .collect(),
            moved: Condvar::new(),
            failed: AtomicBool::new(false),
        };
        let work = Box::new(move || run.all());
        let scheduler: &Scheduler = &context.scheduler;
        let point = scheduler.submit_after(stream, points, work)?;
        place.last = Some(point);
        for (_, event, time) in recorded {
            context.events.note(event, point, time)?;
        }
        Ok(())
    }

    /// There is nothing to be brought to a device: the stream and the graph need only exist.
    fn upload_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        context.scheduler.frontier(stream)?;
        let known = context.graphs.lock().contains_key(&executable.0);
        known.then_some(()).ok_or(CuError::INVALID_HANDLE)
    }

    fn destroy_graph(&self, executable: RawGraph) -> Result<()> {
        let context = self.context()?;
        let removed = context.graphs.lock().remove(&executable.0);
        removed.map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    fn enable_node(&self, executable: RawGraph, node: u32, enabled: bool) -> Result<()> {
        let context = self.context()?;
        let mut graphs = context.graphs.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        // A launch that has not run yet keeps the plan that it was made with.
        let plan = Arc::make_mut(&mut place.plan);
        match plan.nodes.get_mut(node as usize) {
            Some(node)
                if matches!(
                    node.step,
                    Step::Kernel { .. } | Step::Copy(_) | Step::Fill(_)
                ) =>
            {
                node.enabled = enabled;
                Ok(())
            }
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(from: u32, to: u32) -> GraphEdge {
        GraphEdge {
            from,
            to,
            data: [0; 3],
        }
    }

    #[test]
    fn a_chain_is_one_lane_and_a_fork_two_that_meet() {
        let chain = lanes(3, &[edge(0, 1), edge(1, 2)]);
        assert_eq!(chain.0, [[0, 1, 2]]);
        assert!(chain.1.iter().all(Vec::is_empty));
        let (fork, after) = lanes(4, &[edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)]);
        assert_eq!(fork, [vec![0, 1, 3], vec![2]]);
        assert_eq!(after, [vec![], vec![], vec![0], vec![2]]);
    }
}
