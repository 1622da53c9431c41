//! Uses the library as a program does, with a backend that answers with known facts.

mod support;

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;
use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use libloading::Library;
use nvml_wrapper_sys::bindings::*;
use support::Backend;
use wormhole_api::nvml::{Class, FUNCTIONS};
use wormhole_lock::{Mutex, MutexGuard};

const FACTS: &str = "name=Test GPU\nuuid=00112233445566778899aabbccddeeff\nmemory.total=1000\n\
    cuda.version=13000\nattribute.20=0\nattribute.33=171\nattribute.34=2\nattribute.37=512\nattribute.50=1\n\
    attribute.75=9\nattribute.76=0\ndriver.version=580.159.04\npci.id=591663326\n\
    host.nvmlDeviceGetPowerUsage=125874\nhost.nvmlDeviceGetFanSpeed=!3\nhost.nvmlDeviceGetEccMode=1,0\n\
    host.nvmlDeviceGetUtilizationRates=37,12\nhost.nvmlDeviceGetClockInfo=1980 1980 3201 !3\n\
    host.nvmlDeviceGetTotalEnergyConsumption=8589934592\nhost.nvmlDeviceValidateInforom=0\n\
    host.nvmlDeviceGetTemperature=37\nhost.nvmlDeviceGetTotalEccErrors=1 2 3 4\nfield.83=3,7545974\nfield.90=!3\n\
    process=12 100\nprocess=7 200\nmemory.used=300\n";

const OK: nvmlReturn_t = 0;
const UNINITIALIZED: nvmlReturn_t = 1;
const INVALID: nvmlReturn_t = 2;
const NOT_SUPPORTED: nvmlReturn_t = 3;
const NO_PERMISSION: nvmlReturn_t = 4;
const NOT_FOUND: nvmlReturn_t = 6;
const TOO_SMALL: nvmlReturn_t = 7;
const TIMEOUT: nvmlReturn_t = 10;
const MISMATCH: nvmlReturn_t = 25;

type Device = nvmlDevice_t;
/// Signature for calls by name. Six registers hold the arguments of every function here; one with fewer parameters
/// ignores the rest.
type Any = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> nvmlReturn_t;

static LIBRARY: LazyLock<Library> =
    // SAFETY: this library's initializers do nothing.
    LazyLock::new(|| unsafe { Library::new(support::library()) }.expect("it loads"));
static BACKEND: LazyLock<Backend> = LazyLock::new(|| Backend::start(FACTS));

/// Serializes the tests, since the library has one state per process.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock();
    LazyLock::force(&BACKEND);
    while call("nvmlShutdown", []) == OK {}
    BACKEND.devices.store(1, Ordering::Relaxed);
    BACKEND.say(FACTS);
    turn
}

/// Calls a function with these arguments.
fn call<const N: usize>(name: &str, arguments: [u64; N]) -> nvmlReturn_t {
    let function: Any = support::function(&LIBRARY, name);
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    let [a, b, c, d, e, f] = all;
    // SAFETY: the tests pass valid arguments.
    unsafe { function(a, b, c, d, e, f) }
}

fn address<T>(value: &mut T) -> u64 {
    std::ptr::from_mut(value) as u64
}

/// Initializes the library and returns the handle of the first device.
fn device() -> u64 {
    assert_eq!(call("nvmlInit_v2", []), OK);
    let mut device: Device = null_mut();
    assert_eq!(
        call("nvmlDeviceGetHandleByIndex_v2", [0, address(&mut device)]),
        OK
    );
    device as u64
}

/// Returns the integer that a function writes for a device.
fn number(name: &str, device: u64) -> Result<u32, nvmlReturn_t> {
    let mut number = 0xdead_beef_u32;
    match call(name, [device, address(&mut number)]) {
        OK => Ok(number),
        code => Err(code),
    }
}

fn string(name: &str, device: u64) -> String {
    let mut buffer = [0u8; 96];
    assert_eq!(
        call(name, [device, buffer.as_mut_ptr() as u64, 96]),
        OK,
        "{name}"
    );
    CStr::from_bytes_until_nul(&buffer)
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned()
}

#[test]
fn every_function_answers_whatever_it_is_given() {
    let _alone = alone();
    let free = [
        "nvmlInit",
        "nvmlInit_v2",
        "nvmlInitWithFlags",
        "nvmlErrorString",
        "nvmlSystemGetNVMLVersion",
    ];
    let rest = || {
        FUNCTIONS
            .iter()
            .filter(|function| !free.contains(&function.name))
    };
    for function in rest() {
        let code = call(function.name, [0; 6]);
        assert_eq!(code, UNINITIALIZED, "{}", function.name);
    }
    let device = device();
    let wrong = |name: &str| matches!(call(name, [0; 6]), NOT_SUPPORTED | NO_PERMISSION | INVALID);
    let takes_device = |name: &str| {
        name.starts_with("nvmlDeviceGet") && !name.contains("Count") && !name.contains("HandleBy")
    };
    for function in rest().filter(|function| function.name != "nvmlShutdown") {
        let name = function.name;
        let expected = match function.class {
            Class::Unsupported(_) => NOT_SUPPORTED,
            Class::Refused(_) => NO_PERMISSION,
            _ if takes_device(name) || function.class == Class::Host => {
                assert!(wrong(name), "{name} with nothing");
                for forged in [1, device - 1, device + 1, device + 63, u64::MAX] {
                    assert_eq!(
                        call(name, [forged, 0, 0, 0, 0, 0]),
                        INVALID,
                        "{name} of {forged:#x}"
                    );
                }
                continue;
            }
            _ => continue,
        };
        assert_eq!(call(name, [device, 0, 0, 0, 0, 0]), expected, "{name}");
    }
    // Buffers with room for any output, whose version fields have no known version.
    let mut room = [[0u64; 512]; 5];
    for function in rest().filter(|function| function.name != "nvmlShutdown") {
        let first = match function.name {
            name if takes_device(name) || function.class == Class::Host => device,
            _ => room[4].as_mut_ptr() as u64,
        };
        let [a, b, c, d, _] = room.each_mut().map(|place| place.as_mut_ptr() as u64);
        let name = function.name;
        let (a, b) = match name {
            "nvmlDeviceGetFieldValues" => (4, a),
            "nvmlEventSetWait" | "nvmlEventSetWait_v2" => (a, 0),
            _ => (a, b),
        };
        let code = call(name, [first, a, b, c, d, 0]);
        assert!(code <= MISMATCH && code != UNINITIALIZED, "{name} = {code}");
    }
    assert_eq!(call("nvmlShutdown", []), OK);
}

#[test]
fn initializations_are_counted() {
    let _alone = alone();
    let streams = BACKEND.streams.load(Ordering::Relaxed);
    assert_eq!(call("nvmlInit", []), OK);
    assert_eq!(call("nvmlInitWithFlags", [1]), OK);
    assert_eq!(call("nvmlShutdown", []), OK);
    let mut count = 0u32;
    assert_eq!(call("nvmlDeviceGetCount_v2", [address(&mut count)]), OK);
    assert_eq!(count, 1);
    assert_eq!(call("nvmlShutdown", []), OK);
    assert_eq!(
        call("nvmlDeviceGetCount_v2", [address(&mut count)]),
        UNINITIALIZED
    );
    assert_eq!(call("nvmlShutdown", []), UNINITIALIZED);
    assert_eq!(BACKEND.streams.load(Ordering::Relaxed), streams + 1);
}

#[test]
fn a_device_is_what_the_backend_says() {
    let _alone = alone();
    let device = device();
    assert_eq!(string("nvmlDeviceGetName", device), "Test GPU");
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    assert_eq!(string("nvmlDeviceGetUUID", device), uuid);
    let mut short = [0u8; 8];
    let code = call("nvmlDeviceGetName", [device, short.as_mut_ptr() as u64, 8]);
    assert_eq!((code, short), (TOO_SMALL, [0; 8]));
    assert_eq!(number("nvmlDeviceGetMemoryBusWidth", device), Ok(512));
    assert_eq!(number("nvmlDeviceGetArchitecture", device), Ok(9));
    assert_eq!(number("nvmlDeviceGetComputeMode", device), Ok(0));
    assert_eq!(number("nvmlDeviceGetMinorNumber", device), Ok(0));
    let mut capability = (0i32, 7i32);
    let arguments = [
        device,
        address(&mut capability.0),
        address(&mut capability.1),
    ];
    assert_eq!(call("nvmlDeviceGetCudaComputeCapability", arguments), OK);
    assert_eq!(capability, (9, 0));
    let mut version = 0i32;
    for name in [
        "nvmlSystemGetCudaDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
    ] {
        assert_eq!(call(name, [address(&mut version)]), OK);
        assert_eq!(version, 13_000);
    }
    let mut buffer = [0u8; 80];
    let code = call(
        "nvmlSystemGetDriverVersion",
        [buffer.as_mut_ptr() as u64, 80],
    );
    assert_eq!((code, &buffer[..11]), (OK, &b"580.159.04\0"[..]));

    let mut pci = [0xffu8; 68];
    assert_eq!(
        call("nvmlDeviceGetPciInfo_v3", [device, address(&mut pci)]),
        OK
    );
    assert_eq!(&pci[..13], b"0001:AB:02.0\0");
    assert_eq!(&pci[36..53], b"00000001:AB:02.0\0");
    assert_eq!(&pci[16..28], [1, 0, 0, 0, 171, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!(&pci[28..32], 591_663_326u32.to_le_bytes());
    // The structures of earlier versions are shorter.
    for (name, bytes) in [
        ("nvmlDeviceGetPciInfo", 32),
        ("nvmlDeviceGetPciInfo_v2", 52),
    ] {
        let mut old = [0xffu8; 68];
        assert_eq!(call(name, [device, address(&mut old)]), OK);
        assert_eq!(old[..32], pci[..32]);
        assert!(old[bytes..].iter().all(|byte| *byte == 0xff), "{name}");
    }
}

#[test]
fn nvidia_smi_finds_its_table() {
    let _alone = alone();
    device();
    let ask = |id: u128| {
        let (mut table, mut id) = (std::ptr::null::<usize>(), id.to_be_bytes());
        let arguments = [address(&mut table), address(&mut id)];
        (call("nvmlInternalGetExportTable", arguments), table)
    };
    let id = 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4;
    let (code, table) = ask(id);
    assert_eq!(code, OK);
    // SAFETY: the first word of a table is its size in bytes; the others are function addresses.
    let words = unsafe { std::slice::from_raw_parts(table, *table / 8) };
    assert_eq!(words.len(), 270);
    let call_slot = |slot: usize, arguments: [u64; 3]| {
        // SAFETY: as above; the functions take these arguments, or fewer.
        unsafe {
            let function: extern "C" fn(u64, u64, u64) -> nvmlReturn_t =
                std::mem::transmute(words[slot] as *const ());
            function(arguments[0], arguments[1], arguments[2])
        }
    };
    let mut bus = [0xffu8; 16];
    assert_eq!(call_slot(81, [0, address(&mut bus), 0]), OK);
    assert_eq!(&bus[..13], b"0001:AB:02.0\0");
    assert_eq!(call_slot(81, [0, 0, 0]), INVALID);
    assert_eq!(call_slot(81, [9, address(&mut bus), 0]), INVALID);
    assert_eq!(call_slot(26, [0; 3]), OK);
    for slot in (1..270).filter(|slot| ![26, 81].contains(slot)) {
        assert_eq!(call_slot(slot, [0; 3]), NOT_SUPPORTED);
    }
    assert_eq!(ask(id + 1).0, NOT_FOUND);
    assert_eq!(call("nvmlInternalGetExportTable", [0, 0]), INVALID);
}

#[test]
fn a_device_is_found_by_its_names() {
    let _alone = alone();
    let device = device();
    let find = |function: &str, name: &str| {
        let name = CString::new(name).unwrap();
        let mut found = 0u64;
        let code = call(function, [name.as_ptr() as u64, address(&mut found)]);
        (code, found)
    };
    let uuid = "nvmlDeviceGetHandleByUUID";
    assert_eq!(
        find(uuid, "GPU-00112233-4455-6677-8899-aabbccddeeff"),
        (OK, device)
    );
    assert_eq!(find(uuid, "GPU-00112233"), (NOT_FOUND, 0));
    for pci in [
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetHandleByPciBusId_v2",
    ] {
        assert_eq!(find(pci, "0001:AB:02.0"), (OK, device));
        assert_eq!(find(pci, "00000001:ab:02.0"), (OK, device));
        assert_eq!(find(pci, "AB:02.0"), (NOT_FOUND, 0));
        assert_eq!(find(pci, "nonsense"), (INVALID, 0));
    }
    let mut binary = nvmlUUID_t {
        version: 52 | 1 << 24,
        type_: 2,
        value: nvmlUUIDValue_t {
            bytes: *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff",
        },
    };
    let mut found = 0u64;
    let by_structure = "nvmlDeviceGetHandleByUUIDV";
    assert_eq!(
        call(by_structure, [address(&mut binary), address(&mut found)]),
        OK
    );
    assert_eq!(found, device);
    binary.version = 1;
    assert_eq!(
        call(by_structure, [address(&mut binary), address(&mut found)]),
        MISMATCH
    );
    // A second device and its handle.
    BACKEND.devices.store(2, Ordering::Relaxed);
    assert_eq!(call("nvmlShutdown", []), OK);
    assert_eq!(call("nvmlInit_v2", []), OK);
    let by_index = |index| {
        let mut found = 0u64;
        let code = call("nvmlDeviceGetHandleByIndex", [index, address(&mut found)]);
        (code, found)
    };
    let (code, second) = by_index(1);
    assert!(code == OK && second != device);
    assert_eq!(number("nvmlDeviceGetIndex", second), Ok(1));
    assert_eq!(by_index(2).0, INVALID);
}

#[test]
fn memory_and_processes_are_those_of_the_moment() {
    let _alone = alone();
    let device = device();
    let memory = || {
        let mut memory = [0u64; 3];
        assert_eq!(
            call("nvmlDeviceGetMemoryInfo", [device, address(&mut memory)]),
            OK
        );
        let mut second = [0u64; 5];
        assert_ne!(
            call("nvmlDeviceGetMemoryInfo_v2", [device, address(&mut second)]),
            OK
        );
        second[0] = 40 | 2 << 24;
        assert_eq!(
            call("nvmlDeviceGetMemoryInfo_v2", [device, address(&mut second)]),
            OK
        );
        let [_, total, reserved, free, used] = second;
        assert_eq!(reserved + free + used, total);
        assert_eq!(memory, [total, free, total - free]);
        (total, used, free)
    };
    assert_eq!(memory(), (1000, 300, 700));
    BACKEND.say(&FACTS.replace("memory.used=300", "memory.used=350\nmemory.free=100"));
    assert_eq!(memory(), (1000, 350, 100));

    let mut count = 0u32;
    let v3 = "nvmlDeviceGetComputeRunningProcesses_v3";
    assert_eq!(call(v3, [device, address(&mut count), 0]), TOO_SMALL);
    assert_eq!(count, 2);
    let mut processes = [nvmlProcessInfo_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    }; 3];
    count = 3;
    assert_eq!(
        call(v3, [device, address(&mut count), address(&mut processes)]),
        OK
    );
    let told = processes.map(|process| (process.pid, process.usedGpuMemory));
    assert_eq!((count, told), (2, [(7, 200), (12, 100), (0, 0)]));
    let mut first = [[0u64; 2]; 2];
    count = 2;
    let v1 = "nvmlDeviceGetComputeRunningProcesses";
    assert_eq!(
        call(v1, [device, address(&mut count), address(&mut first)]),
        OK
    );
    assert_eq!(first, [[7, 200], [12, 100]]);
    count = 3;
    let graphics = "nvmlDeviceGetGraphicsRunningProcesses_v3";
    assert_eq!(
        call(
            graphics,
            [device, address(&mut count), address(&mut processes)]
        ),
        OK
    );
    assert_eq!(count, 0);

    let mut details = [nvmlProcessDetail_v1_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
        usedGpuCcProtectedMemory: 1,
    }; 2];
    let mut list = nvmlProcessDetailList_t {
        version: 24 | 1 << 24,
        mode: 0,
        numProcArrayEntries: 2,
        procArray: details.as_mut_ptr(),
    };
    let detail = "nvmlDeviceGetRunningProcessDetailList";
    assert_eq!(call(detail, [device, address(&mut list)]), OK);
    let second = details[1];
    assert_eq!(
        (list.numProcArrayEntries, second.pid, second.usedGpuMemory),
        (2, 12, 100)
    );
    list.mode = 3;
    assert_eq!(call(detail, [device, address(&mut list)]), INVALID);
    BACKEND.say(&FACTS.replace("process=12 100\n", ""));
    count = 1;
    assert_eq!(
        call(v3, [device, address(&mut count), address(&mut processes)]),
        OK
    );
}

#[test]
fn what_the_host_says_is_passed_on_with_its_errors() {
    let _alone = alone();
    let device = device();
    assert_eq!(number("nvmlDeviceGetPowerUsage", device), Ok(125_874));
    assert_eq!(number("nvmlDeviceGetFanSpeed", device), Err(NOT_SUPPORTED));
    // The facts do not contain these.
    assert_eq!(
        number("nvmlDeviceGetPersistenceMode", device),
        Err(NOT_SUPPORTED)
    );
    assert_eq!(number("nvmlDeviceGetBrand", device), Ok(0));
    assert_eq!(number("nvmlDeviceGetDisplayActive", device), Ok(0));
    let mut pair = [0u32; 3];
    let second = address(&mut pair[1]);
    assert_eq!(
        call(
            "nvmlDeviceGetEccMode",
            [device, address(&mut pair[0]), second]
        ),
        OK
    );
    assert_eq!(pair, [1, 0, 0]);
    assert_eq!(
        call("nvmlDeviceGetEccMode", [device, address(&mut pair[0]), 0]),
        INVALID
    );
    assert_eq!(
        call(
            "nvmlDeviceGetUtilizationRates",
            [device, address(&mut pair)]
        ),
        OK
    );
    assert_eq!(pair, [37, 12, 0]);
    let clock = |kind| {
        let mut clock = 0u32;
        (
            call(
                "nvmlDeviceGetClockInfo",
                [device, kind, address(&mut clock)],
            ),
            clock,
        )
    };
    assert_eq!((clock(2), clock(3)), ((OK, 3201), (NOT_SUPPORTED, 0)));
    assert_eq!(clock(4), (INVALID, 0));
    let mut large = 0u64;
    assert_eq!(
        call(
            "nvmlDeviceGetTotalEnergyConsumption",
            [device, address(&mut large)]
        ),
        OK
    );
    assert_eq!(large, 1 << 33);
    let errors = "nvmlDeviceGetTotalEccErrors";
    assert_eq!(call(errors, [device, 1, 0, address(&mut large)]), OK);
    assert_eq!(large, 3);
    assert_eq!(call("nvmlDeviceValidateInforom", [device]), OK);

    let mut reading = [12 | 1 << 24, 0u32, 0];
    assert_eq!(
        call("nvmlDeviceGetTemperatureV", [device, address(&mut reading)]),
        OK
    );
    assert_eq!(reading[2], 37);
    reading[0] = 0;
    assert_eq!(
        call("nvmlDeviceGetTemperatureV", [device, address(&mut reading)]),
        MISMATCH
    );

    // SAFETY: integers and a union of numbers, for which zeroes are valid.
    let mut fields: [nvmlFieldValue_t; 3] = unsafe { std::mem::zeroed() };
    (fields[0].fieldId, fields[1].fieldId, fields[2].fieldId) = (83, 90, 9999);
    assert_eq!(
        call(
            "nvmlDeviceGetFieldValues",
            [device, 3, address(&mut fields)]
        ),
        OK
    );
    // SAFETY: every field of the union is a plain number.
    let value = unsafe { fields[0].value.ullVal };
    assert_eq!(
        (fields[0].nvmlReturn, fields[0].valueType, value),
        (OK, 3, 7_545_974)
    );
    assert_eq!(
        fields.map(|field| field.nvmlReturn),
        [OK, NOT_SUPPORTED, NOT_SUPPORTED]
    );
}

/// Sets up two devices. The first has a link to a switch, a link to the other device, an inactive link, and a link for
/// which the host's NVML fails. There are no further links.
fn linked() -> [u64; 2] {
    let more = "links=switch 1 - !3\nfield.165=1,1 1,1 1,1 !3\nfield.164=1,26562 1,26563 1,26564 !3\n\
        host.nvmlDeviceGetNvLinkVersion=7 7 7 !3\np2p.2=!2 0\np2p.3=!2 4\npeers=1\n";
    let second = FACTS.replace("attribute.33=171", "attribute.33=18");
    BACKEND.say(&format!(
        "{FACTS}{more}\n{second}links=switch 0 - !3\np2p.2=0 !2\n"
    ));
    BACKEND.devices.store(2, Ordering::Relaxed);
    let first = device();
    let mut second = 0u64;
    let code = call("nvmlDeviceGetHandleByIndex_v2", [1, address(&mut second)]);
    assert_eq!(code, OK);
    [first, second]
}

#[test]
fn links_lead_to_switches_and_to_devices_of_the_tenant() {
    let _alone = alone();
    let [device, _] = linked();
    let ask = |name: &str, link: u64| {
        let mut number = 0xdead_u32;
        let code = call(name, [device, link, address(&mut number)]);
        if code == OK { Ok(number) } else { Err(code) }
    };
    let links = |name| [0, 1, 2, 3, 18].map(|link| ask(name, link));
    assert_eq!(
        links("nvmlDeviceGetNvLinkState"),
        [Ok(1), Ok(1), Ok(0), Err(NOT_SUPPORTED), Err(INVALID)]
    );
    let none = Err(NOT_SUPPORTED);
    assert_eq!(
        links("nvmlDeviceGetNvLinkRemoteDeviceType"),
        [Ok(2), Ok(0), none, none, Err(INVALID)]
    );
    assert_eq!(ask("nvmlDeviceGetNvLinkVersion", 1), Ok(7));
    let remote = |name: &str, link: u64| {
        let mut pci = [0xeeu8; 68];
        let code = call(name, [device, link, address(&mut pci)]);
        if code == OK { Ok(pci) } else { Err(code) }
    };
    let [earlier, later] = [
        "nvmlDeviceGetNvLinkRemotePciInfo",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    ];
    // A switch has an invalid PCI address.
    let switch = remote(later, 0).unwrap();
    assert_eq!(&switch[..16], b"FFFFFFF:FF:FF.0\0");
    assert_eq!(&switch[36..53], b"FFFFFFFF:FF:FF.0\0");
    assert_eq!(&switch[16..20], [0xff; 4]);
    assert_eq!(&switch[20..28], [0xff, 0, 0, 0, 0xff, 0, 0, 0]);
    assert_eq!(&switch[28..32], [0xff; 4]);
    let other = remote(later, 1).unwrap();
    assert_eq!(&other[..13], b"0001:12:02.0\0");
    assert_eq!(&other[36..53], b"00000001:12:02.0\0");
    assert_eq!(&other[16..28], [1, 0, 0, 0, 18, 0, 0, 0, 2, 0, 0, 0]);
    for (link, pci) in [(0, switch), (1, other)] {
        let old = remote(earlier, link).unwrap();
        assert_eq!(old[..36], pci[..36]);
        assert!(old[36..52].iter().all(|byte| *byte == 0), "reserved");
        assert!(old[52..].iter().all(|byte| *byte == 0xee), "beyond it");
    }
    for name in [earlier, later] {
        for (link, code) in [(2, NOT_SUPPORTED), (3, NOT_SUPPORTED), (18, INVALID)] {
            assert_eq!(remote(name, link), Err(code), "{name} of {link}");
        }
        assert_eq!(call(name, [device, 0, 0]), INVALID);
    }
    // Without facts about links there are none.
    BACKEND.say(FACTS);
    call("nvmlShutdown", []);
    let device = self::device();
    let mut number = 0u32;
    let arguments = [device, 0, address(&mut number)];
    assert_eq!(call("nvmlDeviceGetNvLinkState", arguments), NOT_SUPPORTED);
}

#[test]
fn fields_of_links_are_reported_link_by_link() {
    let _alone = alone();
    let [device, _] = linked();
    let field = |id, scope| {
        // SAFETY: integers and a union of numbers, for which zeroes are valid.
        let mut field: nvmlFieldValue_t = unsafe { std::mem::zeroed() };
        (field.fieldId, field.scopeId) = (id, scope);
        let arguments = [device, 1, address(&mut field)];
        assert_eq!(call("nvmlDeviceGetFieldValues", arguments), OK);
        // SAFETY: every field of the union is a plain number.
        let value = unsafe { field.value.uiVal };
        match field.nvmlReturn {
            OK => Ok((field.valueType, value)),
            code => Err(code),
        }
    };
    let [state, speed] = [165, 164].map(|id| [0, 1, 2, 3, 18].map(|link| field(id, link)));
    let beyond = [Err(NOT_SUPPORTED), Err(INVALID)];
    assert_eq!(state[..3], [Ok((1, 1)), Ok((1, 1)), Ok((1, 0))]);
    assert_eq!(speed[..2], [Ok((1, 26562)), Ok((1, 26563))]);
    assert_eq!((&state[3..], &speed[3..]), (&beyond[..], &beyond[..]));
    // A field of the device ignores the scope, which NCCL does not set.
    assert_eq!(field(83, 0xdead_beef), Ok((3, 7_545_974)));
}

#[test]
fn devices_are_joined_as_the_host_says_if_they_reach_each_other() {
    let _alone = alone();
    let [first, second] = linked();
    let status = |device, other, index| {
        let mut status = 9u32;
        let arguments = [device, other, index, address(&mut status)];
        (call("nvmlDeviceGetP2PStatus", arguments), status)
    };
    // Read, write, NVLink, atomics, PCI, unknown.
    let all = |device, other| [0, 1, 2, 3, 4, 5].map(|index| status(device, other, index));
    let (yes, no) = ((OK, 0), (OK, 5));
    assert_eq!(all(first, second), [yes, yes, yes, (OK, 4), no, yes]);
    assert_eq!(all(second, first), [no; 6]);
    assert_eq!(all(first, first), [yes, yes, yes, yes, no, yes]);
    assert_eq!(status(first, second, 6), (INVALID, 9));
    assert_eq!(status(first, 1, 0), (INVALID, 9));
}

#[test]
fn what_changes_by_itself_is_asked_anew_and_what_does_not_is_not() {
    let _alone = alone();
    let device = device();
    let asked = || BACKEND.questions.load(Ordering::Relaxed);
    let before = asked();
    for _ in 0..100 {
        string("nvmlDeviceGetName", device);
    }
    assert_eq!(asked(), before);
    BACKEND.say(&FACTS.replace("=125874", "=99"));
    while number("nvmlDeviceGetPowerUsage", device) != Ok(99) {}
    assert!(asked() > before);
}

#[test]
fn the_name_of_a_process_is_that_of_the_guest() {
    let _alone = alone();
    device();
    let mut buffer = [0u8; 512];
    let name = |pid: u64, room: u64, buffer: &mut [u8; 512]| {
        call(
            "nvmlSystemGetProcessName",
            [pid, buffer.as_mut_ptr() as u64, room],
        )
    };
    assert_eq!(name(std::process::id().into(), 512, &mut buffer), OK);
    let found = CStr::from_bytes_until_nul(&buffer)
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    assert_eq!(Some(found.as_str()), std::env::args().next().as_deref());
    assert_eq!(name(std::process::id().into(), 4, &mut buffer), OK);
    assert_eq!(
        buffer[..4],
        [
            found.as_bytes()[0],
            found.as_bytes()[1],
            found.as_bytes()[2],
            0
        ]
    );
    assert_eq!(name(u32::MAX.into(), 512, &mut buffer), NOT_FOUND);
}

#[test]
fn a_set_of_events_stays_empty() {
    let _alone = alone();
    let device = device();
    let (mut first, mut second, mut types) = (0u64, 0u64, 9u64);
    assert_eq!(call("nvmlEventSetCreate", [address(&mut first)]), OK);
    assert_eq!(call("nvmlEventSetCreate", [address(&mut second)]), OK);
    assert_ne!(first, second);
    assert_eq!(
        call(
            "nvmlDeviceGetSupportedEventTypes",
            [device, address(&mut types)]
        ),
        OK
    );
    assert_eq!(types, 0);
    assert_eq!(
        call("nvmlDeviceRegisterEvents", [device, 1, first]),
        NOT_SUPPORTED
    );
    let mut data = [0u64; 4];
    assert_eq!(
        call("nvmlEventSetWait_v2", [first, address(&mut data), 5]),
        TIMEOUT
    );
    assert_eq!(call("nvmlEventSetFree", [first]), OK);
    assert_eq!(call("nvmlEventSetFree", [first]), INVALID);
    assert_eq!(
        call("nvmlEventSetWait", [first, address(&mut data), 5]),
        INVALID
    );
    assert_eq!(call("nvmlEventSetFree", [second]), OK);
}

#[test]
fn a_forked_child_asks_on_a_stream_of_its_own() {
    let _alone = alone();
    let device = device();
    let streams = BACKEND.streams.load(Ordering::Relaxed);
    // Looked up before the fork, so that the child calls only the library.
    let power: unsafe extern "C" fn(Device, *mut u32) -> nvmlReturn_t =
        support::function(&LIBRARY, "nvmlDeviceGetPowerUsage");
    let shut_down: unsafe extern "C" fn() -> nvmlReturn_t =
        support::function(&LIBRARY, "nvmlShutdown");
    // SAFETY: the child calls the library, which allocates and connects, and `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut number = 0;
        // SAFETY: a handle and an integer.
        let told = unsafe { power(device as Device, &raw mut number) } == OK && number == 125_874;
        // SAFETY: plain calls; the second ends the child without running the parent's handlers.
        unsafe {
            let ended = shut_down() == OK && shut_down() == UNINITIALIZED;
            libc::_exit(i32::from(!(told && ended)));
        }
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "status {status:#x}"
    );
    assert_eq!(BACKEND.streams.load(Ordering::Relaxed), streams + 1);
    assert_eq!(number("nvmlDeviceGetPowerUsage", device), Ok(125_874));
    assert_eq!(call("nvmlShutdown", []), OK);
}

/// Returns the descriptor of the library's stream.
fn stream() -> i32 {
    let inode = BACKEND.inode.load(Ordering::Relaxed);
    (3..1024)
        .find(|descriptor| support::inode(*descriptor) == Some(inode))
        .expect("the library has a stream")
}

#[test]
fn a_forked_child_loses_the_stream_and_no_file_of_its_own() {
    let _alone = alone();
    let device = device();
    let stream = stream();
    let power: unsafe extern "C" fn(Device, *mut u32) -> nvmlReturn_t =
        support::function(&LIBRARY, "nvmlDeviceGetPowerUsage");
    // SAFETY: the child makes plain calls, calls the library, which allocates and connects, and `_exit`.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let file = |descriptor| {
                let mut status: libc::stat = std::mem::zeroed();
                let found = libc::fstat(descriptor, &raw mut status) == 0;
                found.then_some((status.st_dev, status.st_ino))
            };
            let lost = file(stream).is_none();
            let kept = libc::dup2(2, stream) == stream
                && power(device as Device, &mut 0) == OK
                && file(stream) == file(2);
            libc::_exit(i32::from(!lost) + 2 * i32::from(!kept));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0);
    }
    assert_eq!(number("nvmlDeviceGetPowerUsage", device), Ok(125_874));
    assert_eq!(call("nvmlShutdown", []), OK);
}

#[test]
fn errors_have_words() {
    let words: unsafe extern "C" fn(nvmlReturn_t) -> *const c_char =
        support::function(&LIBRARY, "nvmlErrorString");
    // SAFETY: the function returns a static string.
    let words = unsafe { CStr::from_ptr(words(3)) };
    assert_eq!(words, c"Not Supported");
}
