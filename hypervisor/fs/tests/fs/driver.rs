//! The driver's side of the protocol.

use rustix::io::Errno;
use wormhole_fs::abi::{
    AttrOut, Dirent, EntryOut, InHeader, InitIn, InitOut, OutHeader, ROOT, ReadIn, opcode,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Sends a request and returns the reply, if there is one.
type Send<'a> = Box<dyn FnMut(&[u8]) -> Option<Vec<u8>> + 'a>;

pub struct Driver<'a> {
    send: Send<'a>,
    unique: u64,
}

/// Name, node and kind of an entry; the node is 0 in a listing without nodes.
pub type Listed = (String, u64, u32);

pub fn read<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> T {
    T::read_from_prefix(bytes).expect("a whole message").0
}

impl<'a> Driver<'a> {
    /// Creates a driver that has sent INIT.
    pub fn new(send: impl FnMut(&[u8]) -> Option<Vec<u8>> + 'a) -> Self {
        let mut driver = Self {
            send: Box::new(send),
            unique: 0,
        };
        let asked = InitIn {
            major: 7,
            minor: 38,
            max_readahead: 128 << 10,
            flags: u32::MAX,
        };
        let answer = driver.ask(opcode::INIT, 0, asked.as_bytes());
        let answer: InitOut = read(&answer.expect("INIT is answered"));
        assert_eq!((answer.major, answer.minor), (7, 31));
        driver
    }

    /// Sends a request, and returns the reply's body or error.
    pub fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let reply = self.send(opcode, node, body).expect("a reply");
        let header: OutHeader = read(&reply);
        assert_eq!(header.len as usize, reply.len());
        assert_eq!(header.unique, self.unique);
        match header.error {
            0 => Ok(reply[size_of::<OutHeader>()..].to_vec()),
            error => Err(Errno::from_raw_os_error(-error)),
        }
    }

    pub fn send(&mut self, opcode: u32, node: u64, body: &[u8]) -> Option<Vec<u8>> {
        self.unique += 2;
        let header = InHeader {
            len: u32::try_from(size_of::<InHeader>() + body.len()).unwrap(),
            opcode,
            unique: self.unique,
            node,
            uid: 0,
            gid: 0,
            pid: 1,
            extension: 0,
        };
        (self.send)(&[header.as_bytes(), body].concat())
    }

    pub fn look_up(&mut self, parent: u64, name: &str) -> Result<EntryOut, Errno> {
        let name = [name.as_bytes(), b"\0"].concat();
        let body = self.ask(opcode::LOOKUP, parent, &name)?;
        Ok(read(&body))
    }

    /// Looks up each name of a path.
    pub fn walk(&mut self, path: &str) -> Result<EntryOut, Errno> {
        let mut found = EntryOut {
            node: ROOT,
            ..EntryOut::default()
        };
        for name in path.split('/') {
            found = self.look_up(found.node, name)?;
        }
        Ok(found)
    }

    pub fn metadata(&mut self, node: u64) -> Result<AttrOut, Errno> {
        let body = self.ask(opcode::GETATTR, node, &[0; 16])?;
        Ok(read(&body))
    }

    pub fn read(&mut self, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        self.at(opcode::READ, node, offset, size)
    }

    pub fn at(&mut self, opcode: u32, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let asked = ReadIn {
            offset,
            size,
            ..ReadIn::default()
        };
        self.ask(opcode, node, asked.as_bytes())
    }

    /// Lists a whole folder by replies of `size` bytes, and returns it sorted, without `.` and `..`.
    pub fn list(&mut self, node: u64, plus: bool, size: u32) -> Result<Vec<Listed>, Errno> {
        let opcode = match plus {
            true => opcode::READDIRPLUS,
            false => opcode::READDIR,
        };
        let (mut all, mut offset) = (Vec::new(), 0);
        loop {
            let body = self.at(opcode, node, offset, size)?;
            if body.is_empty() {
                break;
            }
            assert!(body.len() <= size as usize);
            let mut rest = &body[..];
            while !rest.is_empty() {
                let mut found = 0;
                if plus {
                    found = read::<EntryOut>(rest).node;
                    rest = &rest[size_of::<EntryOut>()..];
                }
                let dirent: Dirent = read(rest);
                let len = dirent.namelen as usize;
                let name = &rest[size_of::<Dirent>()..][..len];
                let name = String::from_utf8(name.to_vec()).expect("text");
                rest = &rest[size_of::<Dirent>() + len.next_multiple_of(8)..];
                offset = dirent.off;
                all.push((name, found, dirent.kind));
            }
        }
        all.retain(|(name, ..)| name != "." && name != "..");
        all.sort();
        Ok(all)
    }
}
