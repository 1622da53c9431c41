//! Supervisor of this build, which cargo builds before these tests.

fn main() -> std::process::ExitCode {
    wormhole_supervisor::main()
}
