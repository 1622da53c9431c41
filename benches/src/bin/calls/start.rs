//! Processes that are started together, until each has done its first kernel.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use wormhole_benches::driver::DriverError;
use wormhole_benches::turns::Line;

use crate::Program;

/// Numbers of processes that are started together.
const TOGETHER: [usize; 2] = [1, 8];
/// Rounds that are not counted, after which a backend can know how many processes its tenant starts.
const WARM: u32 = 2;
/// Time between rounds, in which a backend can prepare for the next one.
const PAUSE: Duration = Duration::from_secs(2);

/// Error from processes that are started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("a process cannot be started or read")]
    Process(#[from] std::io::Error),
    #[error("a process ended with {0} before it had done its first kernel")]
    Ended(std::process::ExitStatus),
    #[error("a process printed `{0}` in place of a time")]
    Time(String),
}

/// Starts processes and returns the times of their first kernels. This process makes no call of the driver.
pub fn measure(samples: u32) -> Result<Vec<Line>, StartError> {
    let rounds = samples / 400 + 1;
    let mut lines = Vec::new();
    for count in TOGETHER {
        let (mut medians, mut lasts) = (Vec::new(), Vec::new());
        for round in 0..WARM + rounds {
            std::thread::sleep(PAUSE);
            let times = together(count)?;
            if round >= WARM {
                medians.push(times[count / 2]);
                lasts.push(times[count - 1]);
            }
        }
        let row = |with: String, values| Line::Samples {
            name: "first kernel".to_owned(),
            with,
            values,
            steps: None,
        };
        if count == 1 {
            lines.push(row("1 process".to_owned(), lasts));
        } else {
            lines.push(row(format!("{count} processes together, median"), medians));
            lines.push(row(format!("{count} processes together, last"), lasts));
        }
    }
    Ok(lines)
}

/// Starts processes together and returns the sorted times, in nanoseconds, until each has done its first kernel.
fn together(count: usize) -> Result<Vec<f64>, StartError> {
    let own = std::env::current_exe()?;
    let start = now();
    let spawn = |_| {
        let mut command = Command::new(&own);
        command
            .arg("first")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command.spawn()
    };
    let children = (0..count).map(spawn).collect::<Result<Vec<_>, _>>()?;
    let mut times = Vec::with_capacity(count);
    for mut child in children {
        let mut text = String::new();
        if let Some(output) = &mut child.stdout {
            output.read_to_string(&mut text)?;
        }
        let status = child.wait()?;
        if !status.success() {
            return Err(StartError::Ended(status));
        }
        let done: Duration = text
            .trim()
            .parse()
            .map(Duration::from_nanos)
            .map_err(|_| StartError::Time(text))?;
        times.push(done.saturating_sub(start).as_secs_f64() * 1e9);
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times)
}

/// Does a kernel, as the first work of this process, and prints the moment in which it is done.
pub fn first() -> Result<(), DriverError> {
    let program = Program::start(1)?;
    program.launch(program.stream)?;
    program.wait()?;
    println!("{}", now().as_nanos());
    Ok(())
}

/// Returns the time of a clock that all processes share.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}
