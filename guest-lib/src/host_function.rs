//! Functions of the program that streams call: on one thread of their own, in stream order.
//!
//! A fence says when the work before a function is complete. The thread then calls it and writes a word of
//! the arena, for which the stream has been waiting since, so that the work behind is held back. The program
//! can hold up its own streams so, and nothing else.
//!
//! Words only grow: one may serve the next function while a stream has not yet looked at its last value.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use wormhole_api::{CuResult, Fence, MemoryOperation};

use crate::context::{self, Scope};
use crate::error::{CuError, Result};
use crate::log;
use crate::session::{self, Session};
use crate::stream::Target;
use crate::stream_memory::{self, Word};
use crate::types::{CUhostFn, CUstream, CUstreamCallback};

/// What is called.
#[derive(Clone, Copy, Debug)]
pub enum Function {
    /// `cuLaunchHostFunc`: not called after a fault.
    Plain {
        function: CUhostFn,
        data: *mut c_void,
    },
    /// `cuStreamAddCallback`: told of a fault.
    Callback {
        function: CUstreamCallback,
        stream: CUstream,
        data: *mut c_void,
    },
}

// SAFETY: the pointers are the program's; it hands them over to be given to its function on another thread.
unsafe impl Send for Function {}

impl Function {
    fn call(self, result: CuResult) {
        match self {
            Self::Plain {
                function: Some(function),
                data,
            } if result == CuResult::SUCCESS => {
                // SAFETY: the program asked for this call.
                unsafe { function(data) };
            }
            Self::Callback {
                function: Some(function),
                stream,
                data,
            } => {
                // SAFETY: as above.
                unsafe { function(stream, result.0, data) };
            }
            _ => {}
        }
    }
}

/// A function that was handed over.
struct Pending {
    /// Written when the work before it is complete.
    ready: (Fence, u64),
    /// What its stream waits for.
    done: Done,
    function: Function,
}

/// A word of the arena, and the value that is to be written next.
#[derive(Clone, Copy, Debug)]
struct Done {
    word: Word,
    value: u64,
}

#[derive(Default)]
struct Queue {
    pending: VecDeque<Pending>,
    /// Words that no function has, with the last value of each.
    free: Vec<Done>,
    started: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue {
    pending: VecDeque::new(),
    free: Vec::new(),
    started: false,
});
static ARRIVED: Condvar = Condvar::new();

/// Bytes of arena that words are taken from.
const PAGE: u64 = 4096;
const WORD: u64 = 8;
/// The functions of a program may need as much stack as its threads do.
const STACK: usize = 8 << 20;

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function when the work of a stream so far is complete, and holds the work behind back until it
/// has returned.
pub fn launch(scope: Scope, target: Target, function: Function) -> Result {
    scope.session.alive()?;
    start(scope.session)?;
    let last = take_word(scope)?;
    let done = Done {
        value: last.value + 1,
        ..last
    };
    let cover = match target.fence_now(scope) {
        Ok(cover) => cover,
        Err(error) => {
            queue().free.push(last);
            return Err(error);
        }
    };
    queue().pending.push_back(Pending {
        ready: (cover.fence, cover.value),
        done,
        function,
    });
    ARRIVED.notify_one();
    stream_memory::send(
        scope,
        target,
        &[MemoryOperation {
            kind: stream_memory::WAIT_64,
            flags: stream_memory::GEQ,
            address: done.word.address(),
            value: done.value,
        }],
    )
}

/// Forgets what was not called yet: its streams are gone.
pub fn forget_all() {
    let mut queue = queue();
    let forgotten: Vec<Done> = queue.pending.drain(..).map(|entry| entry.done).collect();
    queue.free.extend(forgotten);
}

fn take_word(scope: Scope) -> Result<Done> {
    if let Some(free) = queue().free.pop() {
        return Ok(free);
    }
    let page = scope.session.allocate_arena(PAGE, PAGE)?;
    let mut words = (0..PAGE / WORD).map(|index| {
        let word = Word::new(page + index * WORD);
        // The page may have been another's before.
        word.get().store(0, Ordering::Relaxed);
        Done { word, value: 0 }
    });
    let first = words.next().ok_or(CuError::UNKNOWN)?;
    queue().free.extend(words);
    Ok(first)
}

/// Starts the thread, once in a process. It takes no signal of the program's.
fn start(session: &'static Session) -> Result {
    let mut queue = queue();
    if queue.started {
        return Ok(());
    }
    session::spawn_quiet("wormhole-host", STACK, move || serve(session)).map_err(|error| {
        log::error_once!("no thread for host functions: {error}");
        CuError::OPERATING_SYSTEM
    })?;
    queue.started = true;
    Ok(())
}

fn serve(session: &'static Session) {
    context::forbid_calls();
    loop {
        let mut waiting = queue();
        while waiting.pending.is_empty() {
            waiting = ARRIVED
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(waiting);
        match session.wait(|| take_ready(session)) {
            Ok(entry) => run(entry, CuResult::SUCCESS),
            Err(error) => {
                let rest = std::mem::take(&mut queue().pending);
                rest.into_iter().for_each(|entry| run(entry, error));
            }
        }
    }
}

/// Takes the first function whose turn has come, or an end of the wait when there is none left.
fn take_ready(session: &Session) -> Option<Pending> {
    let mut queue = queue();
    let index = queue
        .pending
        .iter()
        .position(|entry| session.fence_passed(entry.ready.0, entry.ready.1))?;
    queue.pending.remove(index)
}

fn run(entry: Pending, result: CuResult) {
    entry.function.call(result);
    // SYNC POINT: stream word. What the function wrote is visible to the work behind it.
    entry
        .done
        .word
        .get()
        .store(entry.done.value, Ordering::Release);
    queue().free.push(entry.done);
}
