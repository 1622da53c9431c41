//! Functions of NVML, and the calls of the host's NVML that serve them.

/// Exported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    pub name: &'static str,
    pub class: Class,
}

/// Way in which a function is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Answered by the guest's library.
    Answered,
    /// Answered with the result of the host's NVML.
    Host,
    /// Returns `NVML_ERROR_NOT_SUPPORTED`, for the given reason.
    Unsupported(&'static str),
    /// Returns `NVML_ERROR_NO_PERMISSION`, for the given reason.
    Refused(&'static str),
}

/// Type of an integer that a function returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    U32,
    U64,
}

impl Word {
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U32 => 4,
            Self::U64 => 8,
        }
    }
}

/// Function of the host's NVML: `name(device, selectors…, outputs…)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFunction {
    pub name: &'static str,
    /// True if the result changes with time.
    pub live: bool,
    /// Number of values of each selector; they begin with 0.
    pub selectors: &'static [u32],
    /// Integers of each output.
    pub outputs: &'static [&'static [Word]],
}

impl HostFunction {
    /// Number of calls: one for each combination of selectors.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.selectors.iter().product()
    }

    /// Index of the call with these selectors; `None` if one of them is too large.
    #[must_use]
    pub fn call(&self, selectors: &[u32]) -> Option<u32> {
        let mut number = 0;
        for (selector, count) in selectors.iter().zip(self.selectors) {
            if selector >= count {
                return None;
            }
            number = number * count + selector;
        }
        Some(number)
    }

    /// Selector at `place` of the call with index `call`.
    #[must_use]
    pub fn selector(&self, call: u32, place: usize) -> u32 {
        let after: u32 = self.selectors.iter().skip(place + 1).product();
        let count = self.selectors.get(place).copied().unwrap_or(1);
        call / after % count
    }

    /// Number of integers that a call returns; 0 if it returns only a status.
    #[must_use]
    pub fn words(&self) -> usize {
        self.outputs.iter().map(|words| words.len()).sum()
    }
}

/// Field of `nvmlDeviceGetFieldValues`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub id: u32,
    pub name: &'static str,
    /// True if the value changes with time.
    pub live: bool,
    /// Number of links that have the field; a scope is the index of a link. `None` for a field of the device, which
    /// ignores the scope.
    pub scopes: Option<u32>,
}

impl Field {
    /// Index of the answer for a scope; `None` if the field has no such scope.
    #[must_use]
    pub fn call(&self, scope: u32) -> Option<u32> {
        match self.scopes {
            Some(scopes) => (scope < scopes).then_some(scope),
            None => Some(0),
        }
    }

    /// Number of answers.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.scopes.unwrap_or(1)
    }
}

include!(concat!(env!("OUT_DIR"), "/nvml.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_numbered_by_their_selectors() {
        for function in HOST {
            for call in 0..function.calls() {
                let selectors: [u32; 2] =
                    core::array::from_fn(|place| function.selector(call, place));
                let used = &selectors[..function.selectors.len()];
                assert_eq!(function.call(used), Some(call), "{}", function.name);
            }
            assert!(function.selectors.len() <= 2, "{}", function.name);
            let beyond: [u32; 2] = core::array::from_fn(|place| {
                function.selectors.get(place).copied().unwrap_or_default()
            });
            if !function.selectors.is_empty() {
                assert_eq!(function.call(&beyond[..function.selectors.len()]), None);
            }
        }
    }
}
