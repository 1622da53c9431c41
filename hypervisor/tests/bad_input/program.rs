//! The plain program: calls, each function's in a process of its own, and a line for each answer.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;

use crate::arguments::{Memory, bad};
use crate::fixture::Fixture;
use crate::library::{ABSENT, Library};
use crate::specification::Call;

/// Seconds that one call may take.
const PATIENCE: u32 = 20;
/// After a fault these are left out: they take the context away from what follows.
const ENDING: [&str; 8] = [
    "cuCtxDestroy_v2",
    "cuCtxDetach",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxCreate_v2",
    "cuDevicePrimaryCtxReset_v2",
    "cuDevicePrimaryCtxRelease_v2",
];

/// Makes all calls and prints the answers.
pub fn run(calls: &[Call]) {
    in_children(|pipe, from| uninitialised(pipe, calls, from));
    in_children(|pipe, from| faulted(pipe, calls, from));
    for call in calls {
        in_children(|pipe, from| wrong(pipe, call, from));
    }
}

/// Where a child tells what it does.
struct Pipe(std::fs::File);

impl Pipe {
    /// The next thing to be tried; whoever dies now died of it.
    fn start(&mut self, index: usize, case: &str) {
        // SAFETY: no pointers.
        unsafe { libc::alarm(PATIENCE) };
        self.tell(&format!("start {index} {case}"));
    }

    fn done(&mut self, answer: &str) {
        self.tell(&format!("done {answer}"));
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.0, "{line}").expect("the parent reads");
    }
}

/// What is to follow a child's work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Another child goes on.
    Child,
    Nothing,
}

/// Runs a part in children: after one that died, another goes on behind what it died of.
fn in_children(body: impl Fn(&mut Pipe, usize) -> Next) {
    let mut from = 0;
    loop {
        let mut ends = [0; 2];
        // SAFETY: two places are writable.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: there is one thread; the child runs the body and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: this process's own end, which nobody else uses.
            let mut pipe = Pipe(unsafe { std::fs::File::from_raw_fd(ends[1]) });
            if body(&mut pipe, from) == Next::Child {
                pipe.tell("again");
            }
            // SAFETY: ends the child without the parent's handlers.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: the child's end; the other is this process's own.
        let reader = unsafe {
            libc::close(ends[1]);
            std::fs::File::from_raw_fd(ends[0])
        };
        let (mut case, mut again) = (None, false);
        for line in BufReader::new(reader).lines() {
            let line = line.expect("the child writes lines");
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                "start" => {
                    let (index, name) = rest.split_once(' ').expect("a number and a case");
                    from = index.parse::<usize>().expect("a number") + 1;
                    case = Some(name.to_owned());
                }
                "done" => {
                    if let Some(case) = case.take() {
                        println!("{case} {rest}");
                    }
                }
                _ => again = true,
            }
        }
        let mut status = 0;
        // SAFETY: the place is writable.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        if let Some(case) = case {
            let signal = libc::WTERMSIG(status);
            let word = if signal == libc::SIGALRM {
                "hang"
            } else {
                "crash"
            };
            println!("{case} {word} {signal}");
        } else if !again {
            return;
        }
    }
}

/// Good calls before `cuInit`.
fn uninitialised(pipe: &mut Pipe, calls: &[Call], from: usize) -> Next {
    let library = Library::open();
    let mut memory = Memory::new();
    for (index, call) in calls.iter().enumerate().skip(from) {
        if call.name == "cuInit" {
            continue;
        }
        let arguments: Vec<u64> = (call.parameters.iter().enumerate())
            .map(|(place, parameter)| memory.good(place, parameter, None))
            .collect();
        pipe.start(index, &format!("{} before-init", call.name));
        let code = library.call(&call.name, &arguments);
        pipe.done(&word(code));
    }
    Next::Nothing
}

/// Good calls when the device has faulted.
fn faulted(pipe: &mut Pipe, calls: &[Call], from: usize) -> Next {
    let library = Library::open();
    let mut memory = Memory::new();
    library.call("cuInit", &[0]);
    let Some(fixture) = Fixture::new(library) else {
        return Next::Nothing;
    };
    fixture.fault();
    for (index, call) in calls.iter().enumerate().skip(from) {
        if ENDING.contains(&call.name.as_str()) {
            continue;
        }
        let arguments: Vec<u64> = (call.parameters.iter().enumerate())
            .map(|(place, parameter)| memory.good(place, parameter, Some(&fixture)))
            .collect();
        pipe.start(index, &format!("{} after-fault", call.name));
        let code = library.call(&call.name, &arguments);
        pipe.done(&word(code));
    }
    Next::Nothing
}

/// One function, with all that is wrong.
fn wrong(pipe: &mut Pipe, call: &Call, from: usize) -> Next {
    let library = Library::open();
    let mut memory = Memory::new();
    library.call("cuInit", &[0]);
    let Some(mut fixture) = Fixture::new(library) else {
        pipe.start(0, &format!("{} good", call.name));
        pipe.done("no device");
        return Next::Nothing;
    };
    // Case 0 is the good call; the others each replace one argument.
    let count = |fixture: &Fixture| {
        let each = call.parameters.iter().map(|one| bad(one, fixture).len());
        1 + each.sum::<usize>()
    };
    for index in from..count(&fixture) {
        let mut arguments: Vec<u64> = (call.parameters.iter().enumerate())
            .map(|(place, parameter)| memory.good(place, parameter, Some(&fixture)))
            .collect();
        let replaced = (call.parameters.iter().enumerate())
            .flat_map(|(place, parameter)| {
                let list = bad(parameter, &fixture).into_iter();
                list.map(move |(word, value)| (place, word, value))
            })
            .nth(index.wrapping_sub(1));
        let case = match replaced {
            Some((place, word, value)) if index > 0 => {
                arguments[place] = value;
                format!("{} {}={word}", call.name, call.parameters[place].name)
            }
            _ => format!("{} good", call.name),
        };
        pipe.start(index, &case);
        let code = library.call(&call.name, &arguments);
        match fixture.health() {
            // What a call that worked did to the context is its own affair; the next has a process of its own.
            Err(_) if code == 0 => {
                pipe.done(&word(code));
                return Next::Child;
            }
            Err(then) => {
                pipe.done(&format!("{} then {then}", word(code)));
                return Next::Child;
            }
            Ok(()) => pipe.done(&word(code)),
        }
        if code == 0 {
            match Fixture::new(library) {
                Some(fresh) => fixture = fresh,
                None => return Next::Child,
            }
        }
    }
    Next::Nothing
}

fn word(code: u32) -> String {
    match code {
        ABSENT => "absent".to_owned(),
        code => code.to_string(),
    }
}
