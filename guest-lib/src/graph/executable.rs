//! Executable graphs: their instances at the backend, and the guest's part in their launches.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use wormhole_api::constants::graph_instantiate_flags::{
    AUTO_FREE_ON_LAUNCH, DEVICE_LAUNCH, UPLOAD, USE_NODE_PRIORITY,
};
use wormhole_api::constants::graph_instantiate_result as result;
use wormhole_api::handle::{Event, Graph as ExecutableKind};
use wormhole_api::{
    GraphDestroy, GraphEnable, GraphInstantiate, GraphLaunch, GraphUpdate, GraphUpload, Handle,
};
use wormhole_lock::Mutex;

use super::accepted::note_answer;
use super::plan::{Cycle, Described, Plan, Served, Task, update};
use super::work::{Work, may_become};
use super::{ExecutableHandle, GraphHandle, GraphMemory, Model, NodeHandle, with};
use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::handle::{Table, from_pointer};
use crate::object::context::Scope;
use crate::object::event;
use crate::object::stream::{Cover, Target};
use crate::types::CUgraphExec;
use crate::work::host_function::{self, Function};

/// Facts of an executable graph for a launch without the model's lock.
#[derive(Debug, Default)]
pub struct Facts {
    /// True if a launch needs more than one message.
    special: AtomicBool,
    context: AtomicU32,
}

static EXECUTABLES: Table<ExecutableKind, Facts> = Table::new();

#[derive(Debug)]
pub struct Executable {
    /// Graph that was instantiated, which may be destroyed.
    pub(super) graph: GraphHandle,
    flags: u64,
    plan: Plan,
    served: Served,
    tasks: Vec<Task>,
    /// For each step, the number of the backend's node that can be disabled.
    nodes: Vec<u32>,
    /// Changes of guest state by a launch.
    effects: Effects,
    /// True if nodes were set since the backend got the plan.
    stale: bool,
    /// Fence of the last launch in which the guest had a part.
    last: Option<Cover>,
}

/// Resources of destroyed executable graphs, until their last launch is complete.
static RETIRED: Mutex<Vec<(Option<Cover>, Served)>> = Mutex::new(Vec::new());

fn retire(cover: Option<Cover>, served: Served) {
    let mut retired = RETIRED.lock();
    retired.push((cover, served));
}

/// Frees retired resources whose last launch is complete.
fn reap(scope: Scope) {
    let mut retired = RETIRED.lock();
    let done = |(cover, _): &mut (Option<Cover>, Served)| {
        cover.is_none_or(|cover| scope.session.fence_passed(cover.fence, cover.value))
    };
    for (_, served) in retired.extract_if(.., done) {
        served
            .words
            .into_values()
            .for_each(|words| words.give_back());
        for address in served.staging {
            scope.session.free_arena(address);
        }
    }
}

/// Failure to instantiate a graph: the code of the call, a `CUgraphInstantiateResult`, and the node at fault.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    pub code: CuError,
    pub result: u32,
    pub node: Option<NodeHandle>,
}

impl From<CuError> for Refused {
    fn from(code: CuError) -> Self {
        Self {
            code,
            result: result::ERROR,
            node: None,
        }
    }
}

/// Changes of guest state by a launch of a plan. They are computed once, since a plan may be long.
#[derive(Debug, Default)]
struct Effects {
    records: Vec<Handle<Event>>,
    /// Memory that stays allocated after the launch.
    allocates: Vec<Arc<GraphMemory>>,
    /// Memory of other graphs that the launch frees.
    frees: Vec<u64>,
}

impl Effects {
    fn of(plan: &Plan) -> Self {
        let mut effects = Self::default();
        let mut freed: HashSet<u64> = plan
            .steps
            .iter()
            .filter_map(|step| match step.work {
                Work::Free(address) => Some(address),
                _ => None,
            })
            .collect();
        for step in &plan.steps {
            match &step.work {
                Work::RecordEvent(event) => effects.records.push(*event),
                Work::Alloc(memory) if !freed.remove(&memory.address) => {
                    effects.allocates.push(Arc::clone(memory));
                }
                _ => {}
            }
        }
        effects.frees.extend(freed);
        effects
    }

    fn is_empty(&self) -> bool {
        self.records.is_empty() && self.allocates.is_empty() && self.frees.is_empty()
    }
}

impl Executable {
    fn is_special(&self) -> bool {
        !self.tasks.is_empty() || !self.effects.is_empty()
    }
}

pub fn handle(executable: CUgraphExec) -> Result<ExecutableHandle> {
    let handle = from_pointer(executable).ok_or(CuError::INVALID_VALUE)?;
    EXECUTABLES.get(handle).ok_or(CuError::INVALID_VALUE)?;
    Ok(handle)
}

fn mint(scope: Scope, special: bool) -> Result<ExecutableHandle> {
    EXECUTABLES.mint(|facts| {
        facts.special.store(special, Ordering::Relaxed);
        facts.context.store(scope.context, Ordering::Relaxed);
    })
}

fn set_special(handle: ExecutableHandle, special: bool) {
    if let Some(facts) = EXECUTABLES.get(handle) {
        facts.special.store(special, Ordering::Release);
    }
}

/// Implements `cuGraphInstantiate` and its variants.
pub fn instantiate(
    scope: Scope,
    model: &mut Model,
    graph: GraphHandle,
    flags: u64,
) -> std::result::Result<ExecutableHandle, Refused> {
    scope.session.alive()?;
    if flags & !(AUTO_FREE_ON_LAUNCH | UPLOAD | DEVICE_LAUNCH | USE_NODE_PRIORITY) != 0 {
        return Err(CuError::INVALID_VALUE.into());
    }
    if flags & DEVICE_LAUNCH != 0 {
        return Err(CuError::NOT_SUPPORTED.into());
    }
    reap(scope);
    // The memory is allocated once, so only one executable graph at a time may use it.
    let memory = |work: &Work| matches!(work, Work::Alloc(_) | Work::Free(_));
    let holder = |executable: &Executable| executable.graph == graph;
    if model.has(graph, &memory)? && model.executables.values().any(holder) {
        return Err(CuError::NOT_SUPPORTED.into());
    }
    model.check_can_be_executable(graph)?;
    if !model.all_conditions_used(graph)? {
        return Err(Refused {
            code: CuError::INVALID_VALUE,
            result: result::CONDITIONAL_HANDLE_UNUSED,
            node: None,
        });
    }
    let plan = Plan::of(model, graph)?.map_err(|Cycle(node)| Refused {
        code: CuError::INVALID_VALUE,
        result: result::INVALID_STRUCTURE,
        node: Some(node),
    })?;
    if let Some(node) = plan.misplaced() {
        return Err(Refused {
            code: CuError::INVALID_VALUE,
            result: match model.node(node)?.work {
                // Pageable memory belongs to no device.
                Work::Copy(_) => result::MULTIPLE_CTXS_NOT_SUPPORTED,
                _ => result::NODE_OPERATION_NOT_SUPPORTED,
            },
            node: Some(node),
        });
    }
    let handle = mint(scope, true)?;
    let mut served = Served::default();
    let (described, result) = plan.describe(scope, handle, &mut served);
    served.staging = described.staging;
    let result = match result {
        Ok(()) => {
            let message = GraphInstantiate {
                graph: handle,
                flags: flags & USE_NODE_PRIORITY,
            };
            match plan.is_accepted(scope) {
                true => scope.session.record(&message),
                false => note_answer(scope.session.request(&message, |()| ())),
            }
        }
        Err(error) => {
            // The backend still has the partial description.
            let _ = scope.session.record(&GraphDestroy { graph: handle });
            Err(error)
        }
    };
    if let Err(code) = result {
        EXECUTABLES.forget(handle);
        retire(None, served);
        return Err(code.into());
    }
    let executable = Executable {
        graph,
        flags,
        effects: Effects::of(&plan),
        plan,
        served,
        tasks: described.tasks,
        nodes: described.nodes,
        stale: false,
        last: None,
    };
    set_special(handle, executable.is_special());
    model.executables.insert(handle, executable);
    model.graph_mut(graph)?.instantiated = true;
    Ok(handle)
}

/// Implements `cuGraphLaunch`.
pub fn launch(scope: Scope, target: Target, executable: CUgraphExec) -> Result {
    let handle = from_pointer(executable).ok_or(CuError::INVALID_VALUE)?;
    let facts = EXECUTABLES.get(handle).ok_or(CuError::INVALID_VALUE)?;
    capture::check_work(target)?;
    let message = GraphLaunch {
        graph: handle,
        stream: target.handle,
    };
    if facts.special.load(Ordering::Acquire) {
        with(|model| model.launch(scope, target, handle, &message))?;
    } else {
        scope.session.record(&message)?;
    }
    target.launched(scope)
}

/// Implements `cuGraphUpload`.
pub fn upload(scope: Scope, target: Target, executable: CUgraphExec) -> Result {
    let graph = handle(executable)?;
    capture::check_work(target)?;
    with(|model| model.refresh(scope, graph))?;
    scope.session.record(&GraphUpload {
        graph,
        stream: target.handle,
    })?;
    target.worked(scope)
}

impl Model {
    /// Returns the executable graph of a handle.
    pub fn executable(&self, handle: ExecutableHandle) -> Result<&Executable> {
        self.executables.get(&handle).ok_or(CuError::INVALID_VALUE)
    }

    fn executable_mut(&mut self, handle: ExecutableHandle) -> Result<&mut Executable> {
        let executable = self.executables.get_mut(&handle);
        executable.ok_or(CuError::INVALID_VALUE)
    }

    /// Launches an executable graph in which the guest has a part.
    fn launch(
        &mut self,
        scope: Scope,
        target: Target,
        handle: ExecutableHandle,
        message: &GraphLaunch,
    ) -> Result {
        self.refresh(scope, handle)?;
        let Self {
            executables,
            live,
            gone,
            ..
        } = self;
        let executable = executables.get_mut(&handle).ok_or(CuError::INVALID_VALUE)?;
        let steps = &executable.plan.steps;
        let Effects {
            records,
            allocates,
            frees,
        } = &executable.effects;
        let is_live = |memory: &Arc<GraphMemory>| live.contains_key(&memory.address);
        let held = executable.flags & AUTO_FREE_ON_LAUNCH == 0 && allocates.iter().any(is_live);
        if held || !frees.iter().all(|address| live.contains_key(address)) {
            return Err(CuError::INVALID_VALUE);
        }
        for task in &executable.tasks {
            let enabled = steps[task.step].enabled;
            let function = if enabled {
                task.function
            } else {
                Function::Nothing
            };
            host_function::expect(task.words, function);
        }
        if let Err(error) = scope.session.record(message) {
            host_function::expect_no_more(executable.tasks.len());
            return Err(error);
        }
        for memory in allocates {
            live.insert(memory.address, Arc::clone(memory));
        }
        gone.memory
            .extend(frees.iter().filter_map(|address| live.remove(address)));
        records.iter().copied().for_each(event::recorded_by_graph);
        if !executable.tasks.is_empty() {
            executable.last = Some(target.fence_now(scope)?);
        }
        Ok(())
    }

    /// Implements `cuGraphExecDestroy`. Launches under way go on.
    pub fn destroy_executable(&mut self, scope: Scope, handle: ExecutableHandle) -> Result {
        let executable = self
            .executables
            .remove(&handle)
            .ok_or(CuError::INVALID_VALUE)?;
        EXECUTABLES.forget(handle);
        let sent = scope.session.record(&GraphDestroy { graph: handle });
        retire(executable.last, executable.served);
        for step in executable.plan.steps {
            if let Work::Alloc(memory) = step.work {
                self.gone.memory.push(memory);
            }
        }
        reap(scope);
        sent
    }

    /// Destroys the executable graphs of a context.
    fn destroy_executables_of(&mut self, scope: Scope) {
        let own = |handle: &&ExecutableHandle| {
            EXECUTABLES
                .get(**handle)
                .is_some_and(|facts| facts.context.load(Ordering::Relaxed) == scope.context)
        };
        let handles: Vec<_> = self.executables.keys().filter(own).copied().collect();
        for handle in handles {
            // The context is destroyed: a failure ends the session and shows at the next call.
            let _ = self.destroy_executable(scope, handle);
        }
    }

    /// Replaces the plan of an executable graph by one of the same shape.
    fn replace(&mut self, scope: Scope, handle: ExecutableHandle, plan: Plan) -> Result {
        reap(scope);
        let executable = self.executable_mut(handle)?;
        let from = mint(scope, false)?;
        let (described, result) = plan.describe(scope, from, &mut executable.served);
        let result = match result {
            Ok(()) => {
                let message = GraphUpdate {
                    graph: handle,
                    from,
                };
                scope.session.request(&message, |()| ())
            }
            Err(error) => {
                let _ = scope.session.record(&GraphDestroy { graph: from });
                Err(error)
            }
        };
        EXECUTABLES.forget(from);
        let staging = match result {
            Ok(()) => std::mem::replace(&mut executable.served.staging, described.staging),
            Err(_) => described.staging,
        };
        let served = Served {
            staging,
            ..Served::default()
        };
        retire(executable.last, served);
        result?;
        executable.effects = Effects::of(&plan);
        executable.plan = plan;
        executable.stale = false;
        executable.tasks = described.tasks;
        executable.nodes = described.nodes;
        set_special(handle, executable.is_special());
        Ok(())
    }

    /// Sends the backend all nodes that were set, in one update.
    fn refresh(&mut self, scope: Scope, handle: ExecutableHandle) -> Result {
        scope.session.alive()?;
        let executable = self.executable(handle)?;
        if !executable.stale {
            return Ok(());
        }
        let plan = executable.plan.clone();
        self.replace(scope, handle, plan)
    }

    /// Implements `cuGraphExecUpdate`; returns a code, a `CUgraphExecUpdateResult`, and the nodes at fault.
    pub fn update(
        &mut self,
        scope: Scope,
        handle: ExecutableHandle,
        graph: GraphHandle,
    ) -> (Result, u32, Option<NodeHandle>, Option<NodeHandle>) {
        let planned = self
            .check_is_no_body(graph)
            .and_then(|()| Plan::of(self, graph));
        let planned = planned.and_then(|planned| {
            let executable = self.executable(handle)?;
            Ok((planned, &executable.plan))
        });
        let (planned, old) = match planned {
            Ok(found) => found,
            Err(error) => return (Err(error), update::ERROR, None, None),
        };
        let mut plan = match planned {
            Ok(plan) => match plan.misplaced() {
                None => plan,
                misplaced => {
                    let failed = Err(CuError::INVALID_VALUE);
                    return (failed, update::ERROR, misplaced, None);
                }
            },
            Err(Cycle(node)) => {
                let failed = Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
                return (failed, update::ERROR_TOPOLOGY_CHANGED, Some(node), None);
            }
        };
        if let Some((result, node, from)) = old.refuses(&plan) {
            return (Err(CuError::GRAPH_EXEC_UPDATE_FAILURE), result, node, from);
        }
        // The nodes stay those of the graph that was instantiated.
        plan.places.clone_from(&old.places);
        for (new, old) in plan.steps.iter_mut().zip(&old.steps) {
            new.node = old.node;
            new.enabled = old.enabled;
        }
        match self.replace(scope, handle, plan) {
            Ok(()) => (Ok(()), update::SUCCESS, None, None),
            Err(CuError::GRAPH_EXEC_UPDATE_FAILURE) => (
                Err(CuError::GRAPH_EXEC_UPDATE_FAILURE),
                update::ERROR_PARAMETERS_CHANGED,
                None,
                None,
            ),
            Err(error) => (Err(error), update::ERROR, None, None),
        }
    }

    /// Returns the work of a node of an executable graph.
    pub fn executed(&self, handle: ExecutableHandle, node: NodeHandle) -> Result<&Work> {
        self.node(node)?;
        let plan = &self.executable(handle)?.plan;
        let place = plan.places.get(&node).ok_or(CuError::INVALID_VALUE)?;
        Ok(&plan.steps[place.start].work)
    }

    /// Sets the work of a node of an executable graph. The kind of work must stay the same.
    pub fn set_executed(
        &mut self,
        handle: ExecutableHandle,
        node: NodeHandle,
        work: Work,
    ) -> Result {
        let old = self.executed(handle, node)?;
        if !may_become(old, &work) {
            return Err(CuError::INVALID_VALUE);
        }
        let place = self.executable(handle)?.plan.places[&node].clone();
        let inner = match work {
            Work::Child(child) => Some(Plan::of(self, child)?),
            _ => None,
        };
        let executable = self.executable_mut(handle)?;
        let plan = &mut executable.plan;
        if let Some(inner) = inner {
            let inner = inner.map_or_else(|Cycle(_)| Vec::new(), |inner| inner.steps);
            let steps = &mut plan.steps[place.start + 1..place.end - 1];
            let same = steps.len() == inner.len()
                && steps
                    .iter()
                    .zip(&inner)
                    .all(|(old, new)| may_become(&old.work, &new.work) && old.may_hold(&new.work));
            if !same {
                return Err(CuError::INVALID_VALUE);
            }
            for (step, new) in steps.iter_mut().zip(inner) {
                step.work = new.work;
            }
        } else {
            let step = &mut plan.steps[place.start];
            if !step.may_hold(&work) {
                return Err(CuError::INVALID_VALUE);
            }
            step.work = work;
        }
        // The next launch or upload sends it to the backend, with all other nodes that were set.
        executable.stale = true;
        set_special(handle, true);
        Ok(())
    }

    /// Implements `cuGraphExecGetFlags`. Native CUDA omits the flags that change nothing.
    pub fn flags(&self, handle: ExecutableHandle) -> Result<u64> {
        Ok(self.executable(handle)?.flags & !(UPLOAD | USE_NODE_PRIORITY))
    }

    /// Implements `cuGraphNodeGetEnabled`.
    pub fn is_enabled(&self, handle: ExecutableHandle, node: NodeHandle) -> Result<bool> {
        let place = self.can_be_disabled(handle, node)?;
        Ok(self.executable(handle)?.plan.steps[place].enabled)
    }

    fn can_be_disabled(&self, handle: ExecutableHandle, node: NodeHandle) -> Result<usize> {
        match self.executed(handle, node)? {
            Work::Kernel(_) | Work::Copy(_) | Work::Fill(_) => {
                Ok(self.executable(handle)?.plan.places[&node].start)
            }
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Implements `cuGraphNodeSetEnabled`.
    pub fn enable(
        &mut self,
        scope: Scope,
        handle: ExecutableHandle,
        node: NodeHandle,
        enabled: bool,
    ) -> Result {
        let place = self.can_be_disabled(handle, node)?;
        self.refresh(scope, handle)?;
        let executable = self.executable_mut(handle)?;
        let node = executable.nodes[place];
        if node != Described::DONE_HERE {
            scope.session.record(&GraphEnable {
                graph: handle,
                node,
                enabled: enabled.into(),
            })?;
        }
        executable.plan.steps[place].enabled = enabled;
        Ok(())
    }
}

/// Destroys the executable graphs of a context.
pub fn destroy_of(scope: Scope) {
    let destroyed = with(|model| {
        model.destroy_executables_of(scope);
        Ok(())
    });
    debug_assert!(destroyed.is_ok());
}

/// Forgets every executable graph, after the worker has destroyed them all.
pub fn forget_all(scope: Scope) {
    let forgotten = with(|model| {
        for (handle, executable) in std::mem::take(&mut model.executables) {
            EXECUTABLES.forget(handle);
            retire(None, executable.served);
        }
        model.live.clear();
        Ok(())
    });
    debug_assert!(forgotten.is_ok());
    reap(scope);
}
