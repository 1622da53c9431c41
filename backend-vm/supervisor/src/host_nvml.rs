//! The host's NVML, loaded at run time, as a source of facts about devices.
//!
//! The table of NVML's functions (`shared-ring/api/nvml.idl`) selects the functions to call. Values
//! that do not change are queried once.

mod links;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt::Write as _;

use libloading::Library;
use nvml_wrapper_sys::bindings::{
    NVML_NVLINK_MAX_LINKS, nvmlDevice_t, nvmlFieldValue_t,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_ATOMICS as P2P_ATOMICS,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK as P2P_NVLINK, nvmlMemory_t, nvmlPciInfo_t,
    nvmlProcessInfo_t, nvmlReturn_t,
};
use wormhole_api::nvml::{FIELDS, Field, HOST, HostFunction, Word};
use wormhole_ring::control::facts;

use self::links::{Place, Remote};
use crate::Sample;

const LIBRARY: &str = "libnvidia-ml.so.1";
const SUCCESS: nvmlReturn_t = 0;
const INSUFFICIENT_SIZE: nvmlReturn_t = 7;
const FUNCTION_NOT_FOUND: nvmlReturn_t = 13;
/// Largest number of outputs of a function in the table.
const OUTPUTS: usize = 4;
/// Largest number of integers in one output.
const WORDS: usize = 2;

/// Live functions and fields of the table whose answers tell of the moment, or of the last seconds. All others are counters,
/// which tell of all work since the driver was loaded or the device was made.
const MOMENTARY: [&str; 16] = [
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetFanSpeed_v2",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetPowerState",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetClock",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
];
/// `NVML_FI_DEV_MEMORY_TEMP`, `NVML_FI_DEV_POWER_AVERAGE`, `NVML_FI_DEV_POWER_INSTANT`.
const MOMENTARY_FIELDS: [u32; 3] = [82, 185, 186];

/// Kind of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fixed,
    Momentary,
    Counter,
}

impl Kind {
    fn of_function(function: &HostFunction) -> Self {
        match (function.live, MOMENTARY.contains(&function.name)) {
            (false, _) => Self::Fixed,
            (true, true) => Self::Momentary,
            (true, false) => Self::Counter,
        }
    }

    fn of_field(field: &Field) -> Self {
        match (field.live, MOMENTARY_FIELDS.contains(&field.id)) {
            (false, _) => Self::Fixed,
            (true, true) => Self::Momentary,
            (true, false) => Self::Counter,
        }
    }
}

/// Reason why the host's NVML is unusable.
#[derive(Debug, thiserror::Error)]
pub enum HostNvmlError {
    #[error("{LIBRARY} cannot be loaded")]
    Load(#[source] libloading::Error),
    #[error("{LIBRARY} has no {0}")]
    Missing(&'static str),
    #[error("{function} failed with {code}")]
    Failed { function: &'static str, code: u32 },
}

/// The host's NVML, initialized. Used by one thread.
#[derive(Debug)]
pub struct HostNvml {
    library: Library,
    driver_version: String,
    /// UUIDs of the devices of the last query.
    devices: Vec<Option<String>>,
    /// Facts that do not change, by UUID, while the devices stay the same.
    fixed: HashMap<String, String>,
}

/// A device of a tenant.
#[derive(Clone, Copy, Debug)]
struct Own {
    device: nvmlDevice_t,
    pci: Option<nvmlPciInfo_t>,
}

impl HostNvml {
    /// Loads and initializes NVML.
    ///
    /// # Errors
    /// The library is missing, or its initialization fails.
    pub fn load() -> Result<Self, HostNvmlError> {
        // SAFETY: the driver's own library; its initializers do nothing but set it up.
        let library = unsafe { Library::new(LIBRARY) }.map_err(HostNvmlError::Load)?;
        let mut nvml = Self {
            library,
            driver_version: String::new(),
            devices: Vec::new(),
            fixed: HashMap::new(),
        };
        let init = "nvmlInit_v2";
        let function = nvml
            .function::<unsafe extern "C" fn() -> nvmlReturn_t>(init)
            .ok_or(HostNvmlError::Missing(init))?;
        // SAFETY: called by the function's prototype.
        let code = unsafe { function() };
        if code != SUCCESS {
            return Err(HostNvmlError::Failed {
                function: init,
                code,
            });
        }
        nvml.driver_version = nvml.text("nvmlSystemGetDriverVersion").unwrap_or_default();
        Ok(nvml)
    }

    /// Queries the devices with these UUIDs, 32 hexadecimal digits each.
    pub fn sample(&mut self, uuids: &[Option<String>]) -> Vec<Sample> {
        if self.devices != uuids {
            self.devices = uuids.to_vec();
            self.fixed.clear();
        }
        let own: Vec<Option<Own>> = uuids
            .iter()
            .map(|uuid| {
                let device = self.device(uuid.as_ref()?)?;
                let pci = self.pci(device);
                Some(Own { device, pci })
            })
            .collect();
        let devices = uuids.iter().zip(&own);
        devices
            .map(|(uuid, device)| match (uuid, device) {
                (Some(uuid), Some(device)) => self.sample_one(uuid, device, &own),
                _ => Sample::default(),
            })
            .collect()
    }

    fn sample_one(&mut self, uuid: &str, asked: &Own, own: &[Option<Own>]) -> Sample {
        let device = asked.device;
        let fixed = match self.fixed.get(uuid) {
            Some(fixed) => fixed.clone(),
            None => {
                let fixed = self.facts(device, Kind::Fixed) + &self.connections(device, own);
                self.fixed.insert(uuid.to_owned(), fixed.clone());
                fixed
            }
        };
        let mut facts = fixed;
        let mut live = self.facts(device, Kind::Momentary);
        let _ = writeln!(facts, "{}={}", facts::DRIVER_VERSION, self.driver_version);
        if let Some(memory) = self.memory(device) {
            let _ = writeln!(live, "{}={}", facts::FREE_MEMORY, memory.free);
        }
        if let Some(pci) = asked.pci {
            let _ = writeln!(facts, "{}={}", facts::PCI_ID, pci.pciDeviceId);
            let _ = writeln!(facts, "{}={}", facts::PCI_SUBSYSTEM, pci.pciSubSystemId);
        }
        Sample {
            facts,
            live,
            counters: self.facts(device, Kind::Counter),
            processes: self.processes(device),
        }
    }

    /// Looks a function of the library up.
    fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: `F` is the prototype of the function with this name, as each caller states.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.ok().map(|symbol| *symbol)
    }

    fn text(&self, name: &str) -> Option<String> {
        type Ask = unsafe extern "C" fn(*mut c_char, u32) -> nvmlReturn_t;
        let ask = self.function::<Ask>(name)?;
        let mut buffer = [0u8; 96];
        // SAFETY: the function writes at most as many bytes as its second argument.
        let code = unsafe { ask(buffer.as_mut_ptr().cast(), 95) };
        let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_str().ok()?;
        (code == SUCCESS && !text.contains(char::is_control)).then(|| text.to_owned())
    }

    fn device(&self, uuid: &str) -> Option<nvmlDevice_t> {
        type Ask = unsafe extern "C" fn(*const c_char, *mut nvmlDevice_t) -> nvmlReturn_t;
        let ask = self.function::<Ask>("nvmlDeviceGetHandleByUUID")?;
        let name = CString::new(facts::uuid_name(uuid)?).ok()?;
        let mut device: nvmlDevice_t = std::ptr::null_mut();
        // SAFETY: a C string, and a place for a handle.
        let code = unsafe { ask(name.as_ptr(), &raw mut device) };
        (code == SUCCESS).then_some(device)
    }

    fn memory(&self, device: nvmlDevice_t) -> Option<nvmlMemory_t> {
        type Ask = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t;
        let ask = self.function::<Ask>("nvmlDeviceGetMemoryInfo")?;
        let mut memory = nvmlMemory_t {
            total: 0,
            free: 0,
            used: 0,
        };
        // SAFETY: a handle of this library, and a place for the answer.
        let code = unsafe { ask(device, &raw mut memory) };
        (code == SUCCESS).then_some(memory)
    }

    fn pci(&self, device: nvmlDevice_t) -> Option<nvmlPciInfo_t> {
        type Ask = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlPciInfo_t) -> nvmlReturn_t;
        let ask = self.function::<Ask>("nvmlDeviceGetPciInfo_v3")?;
        // SAFETY: integers and characters, for which zeros are valid.
        let mut pci: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: a handle of this library, and a place for the answer.
        let code = unsafe { ask(device, &raw mut pci) };
        (code == SUCCESS).then_some(pci)
    }

    /// Returns the facts on a device's links and peers that its tenant may see.
    fn connections(&self, device: nvmlDevice_t, own: &[Option<Own>]) -> String {
        let places: Vec<Option<Place>> = own
            .iter()
            .map(|own| Some(Place::from(own.as_ref()?.pci.as_ref()?)))
            .collect();
        let links: Vec<String> = (0..NVML_NVLINK_MAX_LINKS)
            .map(|number| links::known(self.link(device, number), &places).to_string())
            .collect();
        let mut text = format!("{}={}\n", facts::LINKS, links.join(" "));
        for index in [P2P_NVLINK, P2P_ATOMICS] {
            let statuses: Vec<String> = own
                .iter()
                .map(|other| match other {
                    Some(other) => self.p2p(device, other.device, index),
                    None => facts::failed(FUNCTION_NOT_FOUND),
                })
                .collect();
            let _ = writeln!(text, "{}{index}={}", facts::P2P, statuses.join(" "));
        }
        text
    }

    /// Returns the device at the other end of a link, if the link is active.
    fn link(&self, device: nvmlDevice_t, number: u32) -> Result<Option<Remote>, nvmlReturn_t> {
        type Number = unsafe extern "C" fn(nvmlDevice_t, u32, *mut u32) -> nvmlReturn_t;
        type Pci = unsafe extern "C" fn(nvmlDevice_t, u32, *mut nvmlPciInfo_t) -> nvmlReturn_t;
        let ask = |name: &str| {
            let ask = self.function::<Number>(name).ok_or(FUNCTION_NOT_FOUND)?;
            let mut answer = 0;
            // SAFETY: a handle of this library, and a place for the answer.
            match unsafe { ask(device, number, &raw mut answer) } {
                SUCCESS => Ok(answer),
                code => Err(code),
            }
        };
        if ask("nvmlDeviceGetNvLinkState")? == 0 {
            return Ok(None);
        }
        let kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType").ok();
        let place = self
            .function::<Pci>("nvmlDeviceGetNvLinkRemotePciInfo_v2")
            .and_then(|ask| {
                // SAFETY: integers and characters, for which zeros are valid.
                let mut pci: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
                // SAFETY: a handle of this library, and a place for the answer.
                let code = unsafe { ask(device, number, &raw mut pci) };
                (code == SUCCESS).then(|| Place::from(&pci))
            });
        Ok(Some(Remote { kind, place }))
    }

    fn p2p(&self, device: nvmlDevice_t, other: nvmlDevice_t, index: u32) -> String {
        type Ask = unsafe extern "C" fn(nvmlDevice_t, nvmlDevice_t, u32, *mut u32) -> nvmlReturn_t;
        let Some(ask) = self.function::<Ask>("nvmlDeviceGetP2PStatus") else {
            return facts::failed(FUNCTION_NOT_FOUND);
        };
        let mut status = 0;
        // SAFETY: handles of this library, and a place for the answer.
        match unsafe { ask(device, other, index, &raw mut status) } {
            SUCCESS => facts::answer(&[u64::from(status)]),
            code => facts::failed(code),
        }
    }

    fn processes(&self, device: nvmlDevice_t) -> BTreeMap<i32, u64> {
        type Ask =
            unsafe extern "C" fn(nvmlDevice_t, *mut u32, *mut nvmlProcessInfo_t) -> nvmlReturn_t;
        let Some(ask) = self.function::<Ask>("nvmlDeviceGetComputeRunningProcesses_v3") else {
            return BTreeMap::new();
        };
        let empty = nvmlProcessInfo_t {
            pid: 0,
            usedGpuMemory: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        let mut room: u32 = 64;
        loop {
            let mut processes = vec![empty; room as usize];
            let mut count = room;
            // SAFETY: a handle of this library, and room for `count` processes.
            let code = unsafe { ask(device, &raw mut count, processes.as_mut_ptr()) };
            match code {
                SUCCESS => {
                    processes.truncate(count as usize);
                    return processes.into_iter().filter_map(held).collect();
                }
                // More processes have started meanwhile.
                INSUFFICIENT_SIZE if room < 1 << 16 => room = count.max(room) * 2,
                _ => return BTreeMap::new(),
            }
        }
    }

    /// Queries the functions and fields of the table of this kind, as facts.
    fn facts(&self, device: nvmlDevice_t, kind: Kind) -> String {
        let mut text = String::new();
        for function in HOST.iter().filter(|one| Kind::of_function(one) == kind) {
            let answers: Vec<String> = (0..function.calls())
                .map(|call| self.ask(device, function, call))
                .collect();
            let _ = writeln!(
                text,
                "{}{}={}",
                facts::HOST,
                function.name,
                answers.join(" ")
            );
        }
        let fields: Vec<&Field> = FIELDS
            .iter()
            .filter(|field| Kind::of_field(field) == kind)
            .collect();
        let mut answers = self.ask_fields(device, &fields).into_iter();
        for field in fields {
            let answers: Vec<String> = (0..field.calls()).filter_map(|_| answers.next()).collect();
            if !answers.is_empty() {
                let _ = writeln!(text, "{}{}={}", facts::FIELD, field.id, answers.join(" "));
            }
        }
        text
    }

    /// Returns the integers that a call outputs, or its error.
    fn ask(&self, device: nvmlDevice_t, function: &HostFunction, call: u32) -> String {
        let mut places = [[0u64; WORDS]; OUTPUTS];
        let code = self.call(device, function, call, &mut places);
        if code != SUCCESS {
            return facts::failed(code);
        }
        let mut numbers = Vec::new();
        for (place, words) in places.iter().zip(function.outputs) {
            let bytes: Vec<u8> = place.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let mut at = 0;
            for word in *words {
                let bytes = &bytes[at..][..word.bytes()];
                numbers.push(match word {
                    Word::U32 => {
                        u64::from(u32::from_ne_bytes(bytes.try_into().unwrap_or_default()))
                    }
                    Word::U64 => u64::from_ne_bytes(bytes.try_into().unwrap_or_default()),
                });
                at += word.bytes();
            }
        }
        facts::answer(&numbers)
    }

    fn call(
        &self,
        device: nvmlDevice_t,
        function: &HostFunction,
        call: u32,
        places: &mut [[u64; WORDS]; OUTPUTS],
    ) -> nvmlReturn_t {
        type Place = *mut c_void;
        type D = nvmlDevice_t;
        type R = nvmlReturn_t;
        let [a, b, c, d] = places
            .each_mut()
            .map(|place| place.as_mut_ptr().cast::<c_void>());
        let selector = |place| function.selector(call, place);
        macro_rules! call {
            (($($kind:ty),*) $($argument:expr),*) => {
                match self.function::<unsafe extern "C" fn(D $(, $kind)*) -> R>(function.name) {
                    // SAFETY: by the table, the function has these parameters after the device, and
                    // each output fits its place.
                    Some(function) => unsafe { function(device $(, $argument)*) },
                    None => FUNCTION_NOT_FOUND,
                }
            };
        }
        match (function.selectors.len(), function.outputs.len()) {
            (0, 0) => call!(()),
            (0, 1) => call!((Place) a),
            (0, 2) => call!((Place, Place) a, b),
            (0, 4) => call!((Place, Place, Place, Place) a, b, c, d),
            (1, 1) => call!((u32, Place) selector(0), a),
            (2, 1) => call!((u32, u32, Place) selector(0), selector(1), a),
            _ => FUNCTION_NOT_FOUND,
        }
    }

    /// Queries fields, and returns each field's answers: one, or one for each link.
    fn ask_fields(&self, device: nvmlDevice_t, fields: &[&Field]) -> Vec<String> {
        type Ask = unsafe extern "C" fn(nvmlDevice_t, i32, *mut nvmlFieldValue_t) -> nvmlReturn_t;
        let Some(ask) = self.function::<Ask>("nvmlDeviceGetFieldValues") else {
            return Vec::new();
        };
        // SAFETY: integers and a union of numbers, for which zeros are valid.
        let empty: nvmlFieldValue_t = unsafe { std::mem::zeroed() };
        let asked = |field: &&Field| {
            let id = field.id;
            (0..field.calls()).map(move |scope| nvmlFieldValue_t {
                fieldId: id,
                scopeId: scope,
                ..empty
            })
        };
        let mut values: Vec<nvmlFieldValue_t> = fields.iter().flat_map(asked).collect();
        let count = i32::try_from(values.len()).unwrap_or(0);
        // SAFETY: a handle of this library, and `count` fields.
        let code = unsafe { ask(device, count, values.as_mut_ptr()) };
        if code != SUCCESS {
            return Vec::new();
        }
        let answer = |value: nvmlFieldValue_t| match value.nvmlReturn {
            // SAFETY: the union was zeroed before, so all its bytes are initialized.
            SUCCESS => facts::answer(&[u64::from(value.valueType), unsafe { value.value.ullVal }]),
            code => facts::failed(code),
        };
        values.into_iter().map(answer).collect()
    }
}

/// Returns a process and the bytes that it holds, if these are known.
fn held(process: nvmlProcessInfo_t) -> Option<(i32, u64)> {
    let known = process.usedGpuMemory != u64::MAX;
    known.then(|| Some((i32::try_from(process.pid).ok()?, process.usedGpuMemory)))?
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::visibility::Visible;

    #[test]
    fn every_function_of_the_table_can_be_asked() {
        for function in HOST {
            let shape = (function.selectors.len(), function.outputs.len());
            let known = [(0, 0), (0, 1), (0, 2), (0, 4), (1, 1), (2, 1)];
            assert!(known.contains(&shape), "{}", function.name);
            for words in function.outputs {
                let bytes: usize = words.iter().map(|word| word.bytes()).sum();
                assert!(bytes <= 8 * WORDS, "{}", function.name);
            }
        }
    }

    #[test]
    fn what_the_moment_shows_is_in_the_table_and_the_energy_is_a_counter() {
        for name in MOMENTARY {
            let found = HOST.iter().find(|function| function.name == name);
            assert!(found.is_some_and(|function| function.live), "{name}");
        }
        for id in MOMENTARY_FIELDS {
            let found = FIELDS.iter().find(|field| field.id == id);
            assert!(found.is_some_and(|field| field.live), "{id}");
        }
        let counters = HOST
            .iter()
            .filter(|one| Kind::of_function(one) == Kind::Counter);
        let counters: Vec<&str> = counters.map(|function| function.name).collect();
        assert!(
            counters.contains(&"nvmlDeviceGetTotalEnergyConsumption"),
            "{counters:?}"
        );
        let fields = FIELDS
            .iter()
            .filter(|one| Kind::of_field(one) == Kind::Counter);
        let fields: Vec<u32> = fields.map(|field| field.id).collect();
        assert!(fields.contains(&83) && fields.contains(&191), "{fields:?}");
    }

    /// Runs all queries against the real library.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn the_host_tells_of_its_device() {
        let mut nvml = HostNvml::load().unwrap();
        type Ask = unsafe extern "C" fn(u32, *mut nvmlDevice_t) -> nvmlReturn_t;
        let by_index = nvml
            .function::<Ask>("nvmlDeviceGetHandleByIndex_v2")
            .unwrap();
        let mut device = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        assert_eq!(unsafe { by_index(0, &raw mut device) }, SUCCESS);
        type Name = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, u32) -> nvmlReturn_t;
        let uuid = nvml.function::<Name>("nvmlDeviceGetUUID").unwrap();
        let mut buffer = [0u8; 96];
        // SAFETY: a buffer of as many bytes as the last argument.
        let code = unsafe { uuid(device, buffer.as_mut_ptr().cast(), 96) };
        assert_eq!(code, SUCCESS);
        let name = CStr::from_bytes_until_nul(&buffer)
            .unwrap()
            .to_str()
            .unwrap();
        let digits: String = name.chars().skip(4).filter(|c| *c != '-').collect();
        let [sample] = &nvml.sample(&[Some(digits)])[..] else {
            panic!("one sample for one device");
        };
        println!(
            "{}{}{}{:?}",
            sample.facts, sample.live, sample.counters, sample.processes
        );
        let power = facts::get(&sample.live, "host.nvmlDeviceGetPowerUsage").unwrap();
        assert!(power.parse::<u64>().is_ok(), "{power}");
        assert!(facts::number(&sample.live, facts::FREE_MEMORY).is_some());
        let energy = facts::get(&sample.counters, "host.nvmlDeviceGetTotalEnergyConsumption");
        assert!(energy.is_some());
        let after_others = sample.for_tenant(Visible::Momentary, &BTreeSet::new());
        let after_others: String = after_others.visible_facts(false).collect();
        for counter in [
            "host.nvmlDeviceGetTotalEnergyConsumption",
            "field.83",
            "field.191",
        ] {
            assert_eq!(facts::get(&after_others, counter), None, "{counter}");
        }
        let beside_others: String = sample.visible_facts(true).collect();
        for activity in [
            "host.nvmlDeviceGetPowerUsage",
            "host.nvmlDeviceGetUtilizationRates",
            "host.nvmlDeviceGetTotalEnergyConsumption",
            "host.nvmlDeviceGetClockInfo",
            "host.nvmlDeviceGetTemperature",
            "field.83",
            facts::FREE_MEMORY,
        ] {
            assert_eq!(facts::get(&beside_others, activity), None, "{activity}");
        }
        assert!(
            facts::get(&sample.facts, facts::DRIVER_VERSION)
                .unwrap()
                .contains('.')
        );
        let clocks = facts::get(&sample.live, "host.nvmlDeviceGetClockInfo").unwrap();
        assert_eq!(clocks.split(' ').count(), 4);
        let links = facts::get(&sample.facts, facts::LINKS).unwrap();
        assert_eq!(links.split(' ').count(), 18);
    }
}
