//! GPU core dump settings (`cuCoredumpSetAttribute`). They are stored and reported. A dump would be written on the
//! host of the device's driver, so enabling one fails.

use std::collections::HashMap;
use std::sync::LazyLock;

use wormhole_lock::{Mutex, MutexGuard};

use wormhole_api::constants::core_dump_flags::{LIGHTWEIGHT_FLAGS, SKIP_ABORT};
use wormhole_api::constants::core_dump_setting::{
    ENABLE_ON_EXCEPTION, ENABLE_USER_TRIGGER, FILE, GENERATION_FLAGS, LIGHTWEIGHT, PIPE,
    TRIGGER_HOST,
};

use crate::error::{CuError, Result};

/// Maximum bytes of a name, with its zero byte.
const NAME_BYTES: usize = 1024;

/// Scope of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingScope {
    Process,
    /// Context, by its identity.
    Context(u64),
}

/// Value of a setting: a boolean, a number, or a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Bool(bool),
    Word(u32),
    Name(Vec<u8>),
}

impl Value {
    /// Returns the size of the value in bytes.
    pub const fn bytes(&self) -> usize {
        match self {
            Self::Bool(_) => 1,
            Self::Word(_) => 4,
            Self::Name(_) => NAME_BYTES,
        }
    }

    /// Encodes the value for a buffer of `bytes` bytes. Names are cut or padded; other values must fit exactly.
    pub fn place(&self, bytes: usize) -> Result<Vec<u8>> {
        let own = match self {
            Self::Bool(value) => vec![u8::from(*value)],
            Self::Word(value) => value.to_ne_bytes().to_vec(),
            Self::Name(name) => {
                let mut place = name.clone();
                place.resize(bytes.min(NAME_BYTES), 0);
                return Ok(place);
            }
        };
        if own.len() == bytes {
            Ok(own)
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }

    /// Decodes a value of the same kind from a program's buffer.
    pub fn read(&self, place: &[u8]) -> Result<Self> {
        match self {
            Self::Bool(_) => match place {
                [value] => Ok(Self::Bool(*value != 0)),
                _ => Err(CuError::INVALID_VALUE),
            },
            Self::Word(_) => place
                .try_into()
                .map(|word| Self::Word(u32::from_ne_bytes(word)))
                .map_err(|_| CuError::INVALID_VALUE),
            Self::Name(_) if place.len() <= NAME_BYTES => {
                let end = place.iter().position(|byte| *byte == 0);
                Ok(Self::Name(place[..end.unwrap_or(place.len())].to_vec()))
            }
            Self::Name(_) => Err(CuError::INVALID_VALUE),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Settings {
    flags: u32,
    file: Vec<u8>,
    pipe: Vec<u8>,
}

impl Settings {
    fn get(&self, setting: u32, scope: SettingScope) -> Result<Value> {
        Ok(match setting {
            ENABLE_ON_EXCEPTION => Value::Bool(false),
            TRIGGER_HOST => Value::Bool(self.flags & SKIP_ABORT == 0),
            LIGHTWEIGHT => Value::Bool(self.flags & LIGHTWEIGHT_FLAGS == LIGHTWEIGHT_FLAGS),
            ENABLE_USER_TRIGGER if scope == SettingScope::Process => Value::Bool(false),
            FILE => Value::Name(self.file.clone()),
            PIPE if scope == SettingScope::Process => Value::Name(self.pipe.clone()),
            GENERATION_FLAGS => Value::Word(self.flags),
            _ => return Err(CuError::INVALID_VALUE),
        })
    }

    fn set(&mut self, setting: u32, value: Value) -> Result {
        let mut mask = |mask: u32, on: bool| {
            self.flags = if on {
                self.flags | mask
            } else {
                self.flags & !mask
            };
        };
        match (setting, value) {
            (ENABLE_ON_EXCEPTION | ENABLE_USER_TRIGGER, Value::Bool(true)) => {
                return Err(CuError::NOT_SUPPORTED);
            }
            (TRIGGER_HOST, Value::Bool(on)) => mask(SKIP_ABORT, !on),
            (LIGHTWEIGHT, Value::Bool(on)) => mask(LIGHTWEIGHT_FLAGS, on),
            (FILE, Value::Name(name)) => self.file = name,
            (PIPE, Value::Name(name)) => self.pipe = name,
            (GENERATION_FLAGS, Value::Word(flags)) => self.flags = flags,
            _ => {}
        }
        Ok(())
    }
}

/// Settings of the process, and of the contexts that do not have the defaults.
#[derive(Debug, Default)]
struct All {
    process: Settings,
    contexts: HashMap<u64, Settings>,
}

impl All {
    fn settings_of(&self, scope: SettingScope) -> Settings {
        match scope {
            SettingScope::Process => self.process.clone(),
            SettingScope::Context(identity) => {
                self.contexts.get(&identity).cloned().unwrap_or_default()
            }
        }
    }
}

static ALL: LazyLock<Mutex<All>> = LazyLock::new(Mutex::default);

fn all() -> MutexGuard<'static, All> {
    ALL.lock()
}

/// Copies the settings of the process to a new context.
pub fn begin(identity: u64) {
    let mut all = all();
    if all.process != Settings::default() {
        let inherited = all.process.clone();
        all.contexts.insert(identity, inherited);
    }
}

pub fn get(scope: SettingScope, setting: u32) -> Result<Value> {
    all().settings_of(scope).get(setting, scope)
}

/// Stores a setting. The caller has checked by [`get`] that the setting exists.
pub fn set(scope: SettingScope, setting: u32, value: Value) -> Result {
    let mut all = all();
    let mut settings = all.settings_of(scope);
    settings.set(setting, value)?;
    match scope {
        SettingScope::Process => all.process = settings,
        SettingScope::Context(identity) => drop(all.contexts.insert(identity, settings)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_the_same_as_the_settings_they_replace() {
        let mut settings = Settings::default();
        let mine = SettingScope::Context(1);
        assert_eq!(settings.get(TRIGGER_HOST, mine), Ok(Value::Bool(true)));
        settings.set(LIGHTWEIGHT, Value::Bool(true)).unwrap();
        assert_eq!(settings.get(GENERATION_FLAGS, mine), Ok(Value::Word(0x2F)));
        settings.set(TRIGGER_HOST, Value::Bool(false)).unwrap();
        assert_eq!(settings.get(GENERATION_FLAGS, mine), Ok(Value::Word(0x3F)));
        settings.set(GENERATION_FLAGS, Value::Word(0x1F)).unwrap();
        assert_eq!(settings.get(LIGHTWEIGHT, mine), Ok(Value::Bool(false)));
        assert_eq!(settings.get(TRIGGER_HOST, mine), Ok(Value::Bool(false)));
    }

    #[test]
    fn contexts_begin_with_the_settings_of_the_process_and_keep_their_own() {
        let (before, after) = (
            SettingScope::Context(u64::MAX - 1),
            SettingScope::Context(u64::MAX),
        );
        let name = |text: &str| Value::Name(text.into());
        set(SettingScope::Process, FILE, name("core")).unwrap();
        begin(u64::MAX);
        assert_eq!(get(before, FILE), Ok(name("")));
        assert_eq!(get(after, FILE), Ok(name("core")));
        set(after, FILE, name("mine")).unwrap();
        assert_eq!(get(after, FILE), Ok(name("mine")));
        assert_eq!(get(SettingScope::Process, FILE), Ok(name("core")));
        assert_eq!(get(after, PIPE), Err(CuError::INVALID_VALUE));
        set(SettingScope::Process, FILE, name("")).unwrap();
    }

    #[test]
    fn names_are_cut_and_filled_and_others_fit() {
        let name = Value::Name(b"abc".to_vec());
        assert_eq!(name.place(2), Ok(b"ab".to_vec()));
        assert_eq!(name.place(5), Ok(b"abc\0\0".to_vec()));
        assert_eq!(name.read(b"de\0f"), Ok(Value::Name(b"de".to_vec())));
        assert!(name.read(&[b'a'; 3000]).is_err());
        assert_eq!(Value::Word(0).place(8), Err(CuError::INVALID_VALUE));
        assert_eq!(Value::Bool(false).read(&[2]), Ok(Value::Bool(true)));
    }
}
