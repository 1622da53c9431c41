//! Kills the monitor, the supervisor, the worker and the backend VM with SIGKILL while a program runs in a guest VM, one
//! party after another in one emulated host. A run must not hang or leave processes behind, and surviving parties get an
//! error.

use std::time::Duration;

use wormhole_images::Image;

use crate::emulated::script_with;
use crate::harness::{beside_other_guests, program};

/// Script that, for each party, starts an endless program in a guest, kills the party once the program runs, and prints
/// the run's status and output. `$1` is the command, `$2` the program. Parties are found by their first word and the
/// begin of their second one.
const SCRIPT: &str = r#"
command=$1 program=$2
exec {never}<> <(:)
pause() { read -r -t 0.2 -u "$never"; }
named() {
    local process words
    found=()
    for process in /proc/[0-9]*; do
        { mapfile -d '' -t words <"$process/cmdline"; } 2>/dev/null || continue
        [[ ${words[0]-} == */"$1" && ${words[1]-} == "$2"* ]] && found+=("${process#/proc/}")
    done
}
failed() {
    echo "$1; what runs:"
    for process in /proc/[0-9]*; do
        mapfile -d '' -t words <"$process/cmdline" && echo "${process#/proc/} ${words[*]}"
    done
    echo "$(</run/out)$(</run/err)"
    exit 9
} 2>/dev/null
kill_party() {
    echo "killing $2"
    : >/run/out
    "$command" run --placement "$1" --host kvm --quiet --timeout 400 -- "$program" >/run/out 2>/run/err &
    run=$!
    until [[ $(</run/out) == *spinning* ]]; do
        kill -0 $run 2>/dev/null || failed "the run ended early"
        pause
    done
    for attempt in 1 2 3 4 5; do
        named "$2" "$3"
        [ ${#found[@]} = 0 ] || break
        pause
    done
    [ ${#found[@]} = 0 ] && failed "no $2 runs"
    kill -9 "${found[@]}"
    wait $run
    echo "status $?"
    echo "$(</run/out)"
    echo "$(</run/err)"
    for party in "wormhole-worker --device" "wormhole-supervisor --fd" "wormhole backend-vm"; do
        for ((looks = 0; ; looks++)); do
            named $party
            [ ${#found[@]} = 0 ] && break
            [ $looks = 300 ] && failed "$party is left"
            pause
        done
    done
    echo "nothing is left after $2"
}
kill_party host wormhole-worker --device
kill_party host wormhole-supervisor --fd
kill_party host wormhole run
kill_party vm wormhole backend-vm
"#;

#[test]
fn a_killed_party_is_an_error_in_the_guest_or_takes_it_along() {
    let _beside = beside_other_guests();
    let spin = program("static", "spin");
    let said = script_with(
        &[Image::guest, Image::backend],
        SCRIPT,
        &[spin.clone().into()],
        &[spin],
        &[],
        Duration::from_secs(600),
    );
    let parts: Vec<&str> = said.split("killing ").skip(1).collect();
    let [worker, supervisor, monitor, backend_vm] = parts[..] else {
        panic!("not four parties: {said}");
    };
    for part in &parts {
        assert!(part.contains("nothing is left after "), "{said}");
    }
    let destroyed = "cudaDeviceSynchronize(): cudaErrorContextIsDestroyed";
    let not_ready = "cudaDeviceSynchronize(): cudaErrorSystemNotReady";
    assert!(worker.contains(destroyed), "the killed worker: {said}");
    assert!(worker.contains("status 1\n"), "the killed worker: {said}");
    assert!(supervisor.contains(not_ready), "the supervisor: {said}");
    assert!(monitor.contains("status 137\n"), "the monitor: {said}");
    assert!(backend_vm.contains(not_ready), "the backend VM: {said}");
    assert!(backend_vm.contains("status 1\n"), "the backend VM: {said}");
}
