//! Executable graphs. Nodes run in the order of the edges; independent branches run at the same time.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use wormhole_device::{
    Condition, Conditional, CuError, Fill, GraphBranch, GraphDescription, GraphEdge, GraphKernel,
    GraphNode, Graphs, Launch, LaunchEvents, MemCopy3d, MemoryOperation, RawEvent, RawGraph,
    RawStream, Result,
};
use wormhole_lock::Mutex;

use crate::copy3d::Move;
use crate::device::{Context, CpuDevice, extent, run_fill};
use crate::event::Events;
use crate::kernel::{Kernel, Surroundings};
use crate::mem_ops;
use crate::memory::Use;
use crate::scheduler::{Milestone, Outcome, Point, Scheduler, Turn, Work};

/// Most lanes of a body, and so branches that run at the same time. Further branches share lanes.
const LANES: usize = 32;

/// Prepared operation of a node.
#[derive(Clone, Debug)]
enum Step {
    Kernel {
        kernel: Arc<Kernel>,
        cooperative: bool,
        launch: GraphKernel,
    },
    Copy(MemCopy3d),
    Fill(Fill),
    Memory(Vec<MemoryOperation>),
    RecordEvent(RawEvent),
    WaitEvent(RawEvent),
    Empty,
    Conditional(Conditional),
}

#[derive(Clone, Debug)]
struct Node {
    step: Step,
    enabled: bool,
    /// Predecessors in other lanes.
    after: Vec<usize>,
}

/// Prepared content of an executable graph.
#[derive(Clone, Debug)]
struct Plan {
    nodes: Vec<Node>,
    edges: Vec<GraphEdge>,
    conditions: Vec<Condition>,
    /// Body of each node.
    inside: Vec<u32>,
    /// Nodes of each lane of each body, in order.
    bodies: Vec<Vec<Vec<usize>>>,
}

impl Plan {
    /// Returns true if an executable graph with this plan can be updated to the other one.
    fn may_become(&self, other: &Self) -> bool {
        let same = |(old, new): (&Node, &Node)| match (&old.step, &new.step) {
            (Step::Conditional(old), Step::Conditional(new)) => old == new,
            (old, new) => std::mem::discriminant(old) == std::mem::discriminant(new),
        };
        self.edges == other.edges
            && self.inside == other.inside
            && self.conditions.len() == other.conditions.len()
            && self.nodes.len() == other.nodes.len()
            && self.nodes.iter().zip(&other.nodes).all(same)
    }
}

#[derive(Debug)]
struct Executable {
    plan: Arc<Plan>,
    /// Values of the conditions; `None` without conditions.
    values: Option<Arc<[AtomicU32]>>,
    /// Point at which the last launch is complete. The next launch waits for it.
    last: Option<Point>,
}

/// Executable graphs of one context.
#[derive(Debug, Default)]
pub struct Executables {
    table: Mutex<HashMap<u64, Executable>>,
    next: AtomicU64,
}

/// Lanes of each body, and each node's predecessors in other lanes.
type Laid = (Vec<Vec<Vec<usize>>>, Vec<Vec<usize>>);

/// Assigns nodes to lanes: behind a predecessor that ends a lane if there is one, otherwise on a new lane. `inside`
/// holds the body of each node.
fn lanes(inside: &[u32], bodies: usize, edges: &[GraphEdge]) -> Laid {
    let mut before = vec![Vec::new(); inside.len()];
    for edge in edges {
        before[edge.to as usize].push(edge.from as usize);
    }
    let mut all: Vec<Vec<Vec<usize>>> = vec![Vec::new(); bodies];
    let mut lane_of = vec![0; inside.len()];
    for (node, body) in inside.iter().enumerate() {
        let lanes = &mut all[*body as usize];
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
    (all, before)
}

/// One launch of a graph.
struct Run {
    plan: Arc<Plan>,
    around: Surroundings,
    copies: HashMap<usize, Move>,
    /// Time at which each event node ran.
    times: HashMap<usize, Arc<OnceLock<Instant>>>,
}

impl Run {
    /// Converts the launch to work of a stream.
    fn work(self) -> Work {
        let run = Arc::new(self);
        let mut body = None;
        Work::of_steps(move |turn| {
            let body = match &mut body {
                Some(body) => body,
                None => {
                    run.reset_conditions();
                    body.insert(Body::begin(&run, 0, turn)?)
                }
            };
            body.step(turn)
        })
    }

    fn values(&self) -> &[AtomicU32] {
        self.around.conditions.as_deref().unwrap_or_default()
    }

    fn reset_conditions(&self) {
        for (condition, value) in self.plan.conditions.iter().zip(self.values()) {
            if condition.assigned {
                value.store(condition.default, Ordering::Relaxed);
            }
        }
    }
}

/// A running body. Its first lane runs in the work that began the body; the others run as separate work.
struct Body {
    first: Lane,
    /// Points at which the other lanes are complete.
    others: Vec<Point>,
}

impl Body {
    fn begin(run: &Arc<Run>, number: u32, turn: &Turn<'_>) -> Result<Self> {
        let number = number as usize;
        let lanes = run.plan.bodies.get(number).map_or(&[][..], Vec::as_slice);
        let awaited = lanes.iter().flatten();
        let awaited = awaited.flat_map(|node| &run.plan.nodes[*node].after);
        let awaited: BTreeSet<usize> = awaited
            .filter(|node| run.plan.inside[**node] as usize == number)
            .copied()
            .collect();
        let milestone = |node| (node, turn.milestone());
        let milestones: Arc<HashMap<_, _>> = Arc::new(awaited.into_iter().map(milestone).collect());
        let lane = |lane| Lane {
            run: Arc::clone(run),
            body: number,
            lane,
            next: 0,
            operation: 0,
            inner: None,
            milestones: Arc::clone(&milestones),
        };
        let others = (1..lanes.len()).map(|number| {
            let mut lane = lane(number);
            turn.begin(Work::of_steps(move |turn| lane.step(turn)))
        });
        let others = others.collect::<Result<_>>()?;
        let first = lane(0);
        Ok(Self { first, others })
    }

    fn step(&mut self, turn: &Turn<'_>) -> Result<Outcome> {
        match self.first.step(turn)? {
            Outcome::Complete if !self.others.is_empty() => {
                Ok(Outcome::After(std::mem::take(&mut self.others)))
            }
            outcome => Ok(outcome),
        }
    }
}

/// A lane of a running body.
struct Lane {
    run: Arc<Run>,
    body: usize,
    lane: usize,
    /// Number of complete nodes.
    next: usize,
    /// Number of complete memory operations of the next node.
    operation: usize,
    /// Body that the next node has begun.
    inner: Option<Box<Body>>,
    /// Milestones of the nodes of this body that other lanes wait for.
    milestones: Arc<HashMap<usize, Milestone>>,
}

impl Lane {
    /// Runs nodes until one must wait.
    fn step(&mut self, turn: &Turn<'_>) -> Result<Outcome> {
        let run = Arc::clone(&self.run);
        let lanes = run.plan.bodies.get(self.body);
        let lane = lanes.and_then(|lanes| lanes.get(self.lane));
        while let Some(&index) = lane.and_then(|lane| lane.get(self.next)) {
            turn.alive()?;
            match self.node(index, turn)? {
                Outcome::Complete => {}
                outcome => return Ok(outcome),
            }
            if let Some(milestone) = self.milestones.get(&index) {
                milestone.reach();
            }
            self.next += 1;
            self.operation = 0;
        }
        Ok(Outcome::Complete)
    }

    fn node(&mut self, index: usize, turn: &Turn<'_>) -> Result<Outcome> {
        let run = Arc::clone(&self.run);
        let node = &run.plan.nodes[index];
        let before = node.after.iter();
        let before = before.filter_map(|node| self.milestones.get(node));
        let before: Vec<Point> = before.map(Milestone::point).collect();
        if !turn.are_reached(&before) {
            return Ok(Outcome::After(before));
        }
        if !node.enabled {
            return Ok(Outcome::Complete);
        }
        match &node.step {
            Step::Kernel {
                kernel,
                cooperative,
                launch,
            } => {
                if !turn.may_run_kernels() {
                    return Ok(Outcome::Kernel);
                }
                let launch = as_launch(launch, RawStream::LEGACY);
                let kernel = Arc::clone(kernel);
                kernel.run(&launch, *cooperative, run.around.clone())()?;
            }
            Step::Copy(_) => {
                if let Some(copy) = run.copies.get(&index) {
                    copy.run();
                }
            }
            Step::Fill(fill) => run_fill(fill),
            Step::Memory(operations) => {
                if let Some(wait) = mem_ops::advance(operations, &mut self.operation) {
                    let memory = Arc::clone(&run.around.memory);
                    return Ok(mem_ops::awaited(wait, memory));
                }
            }
            Step::RecordEvent(_) => {
                if let Some(time) = run.times.get(&index) {
                    time.get_or_init(Instant::now);
                }
            }
            Step::Conditional(node) => return self.conditional(node, turn),
            // The launch itself waits for the events.
            Step::WaitEvent(_) | Step::Empty => {}
        }
        Ok(Outcome::Complete)
    }

    /// Runs the body selected by the condition, once or, for a while node, repeatedly.
    fn conditional(&mut self, node: &Conditional, turn: &Turn<'_>) -> Result<Outcome> {
        let repeats = node.branch == GraphBranch::While;
        let mut inner = self.inner.take();
        if inner.is_none() {
            inner = self.choose(node, turn)?;
        }
        let Some(mut body) = inner else {
            return Ok(Outcome::Complete);
        };
        let outcome = body.step(turn)?;
        if !matches!(outcome, Outcome::Complete) {
            self.inner = Some(body);
            return Ok(outcome);
        }
        if !repeats {
            return Ok(Outcome::Complete);
        }
        self.inner = self.choose(node, turn)?;
        match self.inner {
            // Other work may run between two passes.
            Some(_) => Ok(Outcome::After(Vec::new())),
            None => Ok(Outcome::Complete),
        }
    }

    /// Begins the body that the condition's current value selects, if any.
    fn choose(&self, node: &Conditional, turn: &Turn<'_>) -> Result<Option<Box<Body>>> {
        let value = self.run.values().get(node.condition as usize);
        let Some(number) = value.and_then(|value| node.body(value.load(Ordering::Relaxed))) else {
            return Ok(None);
        };
        Body::begin(&self.run, number, turn).map(|body| Some(Box::new(body)))
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
        events: LaunchEvents::default(),
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
        let bodies = graph.nodes.iter().map(|node| match node {
            GraphNode::Conditional(node) => node.bodies as usize,
            _ => 0,
        });
        let bodies = 1 + bodies.sum::<usize>();
        let inside: Vec<u32> = (0..count).map(|node| graph.body(node)).collect();
        if !inside.iter().all(|body| (*body as usize) < bodies) {
            return Err(CuError::INVALID_VALUE);
        }
        let (bodies, after) = lanes(&inside, bodies, &graph.edges);
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
            conditions: graph.conditions.clone(),
            inside,
            bodies,
        })
    }

    /// Locates the copies of a launch. Fails if memory that its nodes name is no longer allocated.
    fn reached(&self, context: &Context, plan: &Plan) -> Result<HashMap<usize, Move>> {
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
                    let found = self.find_move(context, copy).map_err(gone)?;
                    copies.insert(index, found);
                }
                Step::Fill(fill) => self
                    .memory
                    .check(fill.destination, extent(fill)?, Use::Write)
                    .map_err(gone)?,
                Step::Memory(operations) => operations
                    .iter()
                    .try_for_each(|operation| mem_ops::check(&self.memory, operation))
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
                self.find_move(context, copy).map(drop)?;
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
                    .try_for_each(|operation| mem_ops::check(&self.memory, operation))?;
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
            GraphNode::Conditional(node) => Step::Conditional(*node),
        })
    }
}

/// Returns the points that a launch waits for beside its stream: the graph's previous launch, and the events that its
/// nodes wait for, except those that the graph itself records.
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
        let values = plan.conditions.iter().map(|_| AtomicU32::new(0));
        let values = (!plan.conditions.is_empty()).then(|| values.collect());
        let executable = Executable {
            plan,
            values,
            last: None,
        };
        executables.table.lock().insert(id, executable);
        Ok(RawGraph(id))
    }

    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()> {
        let context = self.context()?;
        let mut plan = self.plan(&context, graph)?;
        let mut graphs = context.graphs.table.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        if !place.plan.may_become(&plan) {
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
        let mut graphs = context.graphs.table.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        let points = points(place, &context.events)?;
        let plan = Arc::clone(&place.plan);
        let copies = match self.reached(&context, &plan) {
            Ok(copies) => copies,
            Err(error) => {
                // A node names memory that was freed since; the launch faults.
                let point = context
                    .scheduler
                    .submit(stream, Work::new(move || Err(error)))?;
                place.last = Some(point);
                return Ok(());
            }
        };
        let uses_heap =
            |node: &Node| matches!(&node.step, Step::Kernel { kernel, .. } if kernel.uses_heap());
        let mut around = self.surroundings(&context, plan.nodes.iter().any(uses_heap));
        around.conditions.clone_from(&place.values);
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
            plan,
            around,
            copies,
            times: recorded
                .iter()
                .map(|(index, _, time)| (*index, Arc::clone(time)))
                .collect(),
        };
        let scheduler: &Scheduler = &context.scheduler;
        let point = scheduler.submit_after(stream, points, run.work())?;
        place.last = Some(point);
        for (_, event, time) in recorded {
            context.events.note(event, point, time)?;
        }
        Ok(())
    }

    /// Checks that the stream and the graph exist. No upload is needed.
    fn upload_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        context.scheduler.frontier(stream)?;
        let known = context.graphs.table.lock().contains_key(&executable.0);
        known.then_some(()).ok_or(CuError::INVALID_HANDLE)
    }

    fn destroy_graph(&self, executable: RawGraph) -> Result<()> {
        let context = self.context()?;
        let removed = context.graphs.table.lock().remove(&executable.0);
        removed.map(drop).ok_or(CuError::INVALID_HANDLE)
    }

    fn enable_node(&self, executable: RawGraph, node: u32, enabled: bool) -> Result<()> {
        let context = self.context()?;
        let mut graphs = context.graphs.table.lock();
        let place = graphs
            .get_mut(&executable.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        // A launch that has not run yet keeps its plan.
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
        let chain = lanes(&[0; 3], 1, &[edge(0, 1), edge(1, 2)]);
        assert_eq!(chain.0, [[[0, 1, 2]]]);
        assert!(chain.1.iter().all(Vec::is_empty));
        let edges = [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)];
        let (fork, after) = lanes(&[0; 4], 1, &edges);
        assert_eq!(fork, [[vec![0, 1, 3], vec![2]]]);
        assert_eq!(after, [vec![], vec![], vec![0], vec![2]]);
    }

    #[test]
    fn each_body_has_lanes_of_its_own() {
        let (bodies, after) = lanes(&[0, 1, 1, 0], 3, &[edge(0, 3), edge(1, 2)]);
        assert_eq!(bodies, [vec![vec![0, 3]], vec![vec![1, 2]], vec![]]);
        assert!(after.iter().all(Vec::is_empty));
    }
}
