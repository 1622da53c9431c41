//! Changes of the exported folder by a guest that may write, and changes that are refused.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use tempfile::TempDir;
use wormhole_fs::abi::{
    AttrOut, EntryOut, HandleIn, OpenIn, OpenOut, ROOT, ReadIn, RenameIn, SetattrIn, WriteIn,
    WriteOut, opcode, valid,
};
use wormhole_fs::server::Server;
use wormhole_fs::tree::{MOST_HANDLES, Tree};
use zerocopy::IntoBytes;

use crate::driver::{Driver, read};
use crate::protocol::{changed, drive};

const RDONLY: u32 = libc::O_RDONLY.unsigned_abs();
pub const WRONLY: u32 = libc::O_WRONLY.unsigned_abs();
pub const RDWR: u32 = libc::O_RDWR.unsigned_abs();
const EXCL: u32 = libc::O_EXCL.unsigned_abs();
const TRUNC: u32 = libc::O_TRUNC.unsigned_abs();
pub const REGULAR: u32 = libc::S_IFREG;

/// Creates `root/folder/text` and a file outside, and a driver of `root` that may write.
pub fn fixture() -> (TempDir, PathBuf, Driver<'static>) {
    let outer = tempfile::tempdir().expect("a folder");
    let root = outer.path().join("root");
    fs::create_dir_all(root.join("folder")).expect("folders");
    fs::write(outer.path().join("secret"), "outside").expect("a file");
    fs::write(root.join("folder/text"), "hello").expect("a file");
    let driver = drive(Server::writable(Tree::open(&root, 1000).expect("a folder")));
    (outer, root, driver)
}

fn name(name: &str) -> Vec<u8> {
    [name.as_bytes(), b"\0"].concat()
}

/// The requests of a guest that may write.
impl Driver<'_> {
    pub fn open(&mut self, node: u64, flags: u32) -> Result<u64, Errno> {
        let asked = OpenIn { flags, mode: 0 };
        let body = self.ask(opcode::OPEN, node, asked.as_bytes())?;
        Ok(read::<OpenOut>(&body).fh)
    }

    pub fn close(&mut self, handle: u64) {
        let closed = HandleIn {
            fh: handle,
            ..HandleIn::default()
        };
        self.ask(opcode::RELEASE, ROOT, closed.as_bytes())
            .expect("closed");
    }

    /// Returns node and handle.
    pub fn create(
        &mut self,
        parent: u64,
        text: &str,
        flags: u32,
        mode: u32,
    ) -> Result<(u64, u64), Errno> {
        let body = [[flags, mode, 0, 0].as_bytes(), &name(text)].concat();
        let body = self.ask(opcode::CREATE, parent, &body)?;
        let opened: OpenOut = read(&body[size_of::<EntryOut>()..]);
        Ok((read::<EntryOut>(&body).node, opened.fh))
    }

    pub fn write(&mut self, handle: u64, offset: u64, content: &[u8]) -> Result<u32, Errno> {
        let asked = WriteIn {
            fh: handle,
            offset,
            size: u32::try_from(content.len()).expect("short"),
            ..WriteIn::default()
        };
        let body = self.ask(opcode::WRITE, 0, &[asked.as_bytes(), content].concat())?;
        Ok(read::<WriteOut>(&body).size)
    }

    pub fn read_open(&mut self, handle: u64) -> Result<Vec<u8>, Errno> {
        let asked = ReadIn {
            fh: handle,
            size: 4096,
            ..ReadIn::default()
        };
        self.ask(opcode::READ, 0, asked.as_bytes())
    }

    pub fn make(&mut self, opcode: u32, parent: u64, text: &str, mode: u32) -> Result<u64, Errno> {
        let fields = match opcode {
            opcode::MKDIR => vec![mode, 0],
            _ => vec![mode, 0x103, 0, 0],
        };
        let body = [fields.as_bytes(), &name(text)].concat();
        let body = self.ask(opcode, parent, &body)?;
        Ok(read::<EntryOut>(&body).node)
    }

    fn link(&mut self, parent: u64, text: &str, target: &str) -> Result<u64, Errno> {
        let body = [name(text), name(target)].concat();
        let body = self.ask(opcode::SYMLINK, parent, &body)?;
        Ok(read::<EntryOut>(&body).node)
    }

    pub fn add_name(&mut self, node: u64, parent: u64, text: &str) -> Result<u64, Errno> {
        let body = [&node.to_ne_bytes()[..], &name(text)].concat();
        let body = self.ask(opcode::LINK, parent, &body)?;
        Ok(read::<EntryOut>(&body).node)
    }

    pub fn remove(&mut self, opcode: u32, parent: u64, text: &str) -> Result<(), Errno> {
        self.ask(opcode, parent, &name(text)).map(drop)
    }

    pub fn rename(
        &mut self,
        (parent, old): (u64, &str),
        (folder, new): (u64, &str),
        flags: u32,
    ) -> Result<(), Errno> {
        let asked = RenameIn {
            folder,
            flags,
            padding: 0,
        };
        let body = [asked.as_bytes(), &name(old), &name(new)].concat();
        self.ask(opcode::RENAME2, parent, &body).map(drop)
    }

    pub fn set(&mut self, node: u64, asked: SetattrIn) -> Result<AttrOut, Errno> {
        let body = self.ask(opcode::SETATTR, node, asked.as_bytes())?;
        Ok(read(&body))
    }
}

fn mode_of(path: &Path) -> u32 {
    path.symlink_metadata().expect("metadata").mode() & 0o7777
}

#[test]
fn files_are_made_written_read_and_removed() {
    let (_outer, root, mut driver) = fixture();
    exercise(&mut driver, &root);
}

/// Makes each kind of change.
pub fn exercise(driver: &mut Driver<'_>, root: &Path) {
    let folder = driver
        .make(opcode::MKDIR, ROOT, "new", 0o750)
        .expect("made");
    let (node, handle) = driver
        .create(folder, "file", RDWR, REGULAR | 0o640)
        .expect("made");
    assert_eq!(driver.write(handle, 0, b"written"), Ok(7));
    assert_eq!(driver.write(handle, 9, b"later"), Ok(5));
    let path = root.join("new/file");
    assert_eq!(fs::read(&path).expect("a file"), b"written\0\0later");
    assert_eq!(
        driver.read_open(handle).as_deref(),
        Ok(&b"written\0\0later"[..])
    );
    assert_eq!((mode_of(&root.join("new")), mode_of(&path)), (0o750, 0o640));
    for opcode in [opcode::FSYNC, opcode::FSYNCDIR] {
        let asked = HandleIn {
            fh: handle,
            ..HandleIn::default()
        };
        let node = if opcode == opcode::FSYNC {
            node
        } else {
            folder
        };
        driver.ask(opcode, node, asked.as_bytes()).expect("synced");
    }
    driver.close(handle);
    assert_eq!(driver.write(handle, 0, b"late"), Err(Errno::BADF));
    assert_eq!(driver.read_open(handle), Err(Errno::BADF));

    let large = vec![7; 128 << 10];
    let handle = driver.open(node, WRONLY).expect("opened");
    assert_eq!(driver.write(handle, 0, &large), Ok(128 << 10));
    assert_eq!(driver.read_open(handle), Err(Errno::BADF));
    assert_eq!(fs::read(&path).expect("a file"), large);
    let reader = driver.open(node, RDONLY).expect("opened");
    assert_eq!(driver.write(reader, 0, b"x"), Err(Errno::BADF));

    let asked = SetattrIn {
        valid: valid::SIZE | valid::MODE | valid::MTIME_NOW,
        size: 1,
        mode: 0o600,
        ..SetattrIn::default()
    };
    assert_eq!(driver.set(node, asked).expect("set").attr.size, 1);
    driver.link(ROOT, "link", "new/file").expect("made");
    driver.add_name(node, ROOT, "second").expect("made");
    driver
        .rename((ROOT, "second"), (folder, "third"), 0)
        .expect("renamed");
    driver
        .make(opcode::MKNOD, folder, "empty", REGULAR | 0o600)
        .expect("made");
    assert_eq!(fs::read(root.join("link")).expect("a file"), [7]);

    assert_eq!(
        driver.remove(opcode::RMDIR, ROOT, "new"),
        Err(Errno::NOTEMPTY)
    );
    for file in ["file", "third", "empty"] {
        assert_eq!(driver.remove(opcode::UNLINK, folder, file), Ok(()));
    }
    assert_eq!(driver.remove(opcode::UNLINK, ROOT, "link"), Ok(()));
    assert_eq!(driver.remove(opcode::RMDIR, ROOT, "new"), Ok(()));
    assert!(!root.join("new").exists());
    assert_eq!(
        driver.remove(opcode::UNLINK, ROOT, "none"),
        Err(Errno::NOENT)
    );
}

#[test]
fn an_open_file_outlives_its_name() {
    let (_outer, root, mut driver) = fixture();
    let (node, handle) = driver
        .create(ROOT, "file", RDWR, REGULAR | 0o400)
        .expect("made");
    driver
        .remove(opcode::UNLINK, ROOT, "file")
        .expect("removed");
    assert!(!root.join("file").exists());
    assert_eq!(driver.write(handle, 0, b"kept"), Ok(4));
    assert_eq!(driver.read_open(handle).as_deref(), Ok(&b"kept"[..]));
    assert_eq!(driver.metadata(node).expect("metadata").attr.size, 4);
    let short = SetattrIn {
        valid: valid::SIZE,
        size: 2,
        ..SetattrIn::default()
    };
    assert_eq!(driver.set(node, short).err(), None);
    // Another file of the name is another node.
    let (other, _) = driver
        .create(ROOT, "file", RDWR, REGULAR | 0o600)
        .expect("made");
    assert_ne!(other, node);
    assert_eq!(driver.read_open(handle).as_deref(), Ok(&b"ke"[..]));
    assert_eq!(driver.open(node, RDONLY).err(), Some(Errno::STALE));
    driver.close(handle);
    assert_eq!(driver.metadata(node).err(), Some(Errno::STALE));
    // A file whose name another one takes is open still.
    let (_, old) = driver
        .create(ROOT, "old", RDWR, REGULAR | 0o600)
        .expect("made");
    driver.write(old, 0, b"old").expect("written");
    driver
        .rename((ROOT, "file"), (ROOT, "old"), 0)
        .expect("renamed");
    assert_eq!(driver.read_open(old).as_deref(), Ok(&b"old"[..]));
}

#[test]
fn a_renamed_folder_has_its_nodes_and_its_files() {
    let (_outer, root, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    let text = driver.look_up(folder, "text").expect("there").node;
    let handle = driver.open(text, RDWR).expect("opened");
    let deep = driver
        .make(opcode::MKDIR, ROOT, "deep", 0o755)
        .expect("made");
    let deeper = driver.make(opcode::MKDIR, deep, "er", 0o755).expect("made");
    driver
        .rename((ROOT, "folder"), (deeper, "moved"), 0)
        .expect("renamed");
    assert_eq!(driver.look_up(ROOT, "folder").err(), Some(Errno::NOENT));
    assert_eq!(driver.write(handle, 0, b"J"), Ok(1));
    assert_eq!(
        fs::read(root.join("deep/er/moved/text")).expect("moved"),
        b"Jello"
    );
    assert_eq!(driver.look_up(folder, "text").expect("there").node, text);
    assert_eq!(driver.look_up(deeper, "moved").expect("there").node, folder);
    // A folder into itself, and flags that the server does not have.
    assert_eq!(
        driver.rename((ROOT, "deep"), (folder, "cycle"), 0),
        Err(Errno::INVAL)
    );
    for flags in [2, 4, 7, 8] {
        let renamed = driver.rename((deep, "er"), (ROOT, "other"), flags);
        assert_eq!(renamed, Err(Errno::INVAL), "{flags}");
    }
    fs::write(root.join("there"), "").expect("a file");
    assert_eq!(
        driver.rename((folder, "text"), (ROOT, "there"), 1),
        Err(Errno::EXIST)
    );
    // RENAME has the folder alone before the names.
    let body = [&folder.to_ne_bytes()[..], &name("there"), &name("here")].concat();
    driver.ask(opcode::RENAME, ROOT, &body).expect("renamed");
    assert!(root.join("deep/er/moved/here").exists());
}

/// The host moves folders so that nodes would have a cycle, which would never end.
#[test]
fn nodes_have_no_cycle_whatever_the_host_moves() {
    let (_outer, root, mut driver) = fixture();
    let a = driver.make(opcode::MKDIR, ROOT, "a", 0o755).expect("made");
    let b = driver.make(opcode::MKDIR, a, "b", 0o755).expect("made");
    driver.look_up(b, "none").expect_err("it is empty");
    fs::create_dir(root.join("x")).expect("a folder");
    fs::rename(root.join("a/b"), root.join("x/b")).expect("moved");
    // The kernel would rename `a` to `x/b/a`.
    assert_eq!(driver.rename((ROOT, "a"), (b, "a"), 0), Err(Errno::INVAL));
    assert!(driver.metadata(a).is_ok());
    assert!(driver.metadata(b).is_err());
}

#[test]
fn links_are_made_and_never_followed() {
    let (outer, root, mut driver) = fixture();
    let before = fs::metadata(outer.path().join("secret")).expect("metadata");
    let secret = outer.path().join("secret").display().to_string();
    let link = driver.link(ROOT, "link", &secret).expect("made");
    let folder = driver.link(ROOT, "out", "..").expect("made");
    assert_eq!(
        fs::read_link(root.join("link")).expect("a link"),
        Path::new(&secret)
    );
    for flags in [RDONLY, WRONLY, RDWR] {
        assert_eq!(driver.open(link, flags), Err(Errno::ACCESS));
    }
    for (what, asked) in [
        (valid::SIZE, 0),
        (valid::MODE, 0o777),
        (valid::ATIME | valid::MTIME, 0),
    ] {
        let asked = SetattrIn {
            valid: what,
            mode: asked,
            ..SetattrIn::default()
        };
        assert_eq!(driver.set(link, asked).err(), Some(Errno::OPNOTSUPP));
    }
    assert_eq!(
        driver.create(folder, "file", RDWR, REGULAR | 0o600),
        Err(Errno::NOTDIR)
    );
    assert_eq!(
        driver.create(ROOT, "link", RDWR | TRUNC, REGULAR | 0o600),
        Err(Errno::ACCESS)
    );
    // A link may get another name, and is not what it leads to.
    driver.add_name(link, ROOT, "second").expect("made");
    assert!(root.join("second").is_symlink());
    let after = fs::metadata(outer.path().join("secret")).expect("metadata");
    assert_eq!(
        (after.len(), after.mode(), after.mtime_nsec(), after.nlink()),
        (7, before.mode(), before.mtime_nsec(), 1)
    );
}

#[test]
fn a_file_gets_more_names() {
    let (_outer, root, mut driver) = fixture();
    let text = driver.walk("folder/text").expect("there").node;
    let other = driver.add_name(text, ROOT, "other").expect("made");
    assert_eq!(driver.metadata(other).expect("metadata").attr.nlink, 2);
    assert_eq!(driver.add_name(text, ROOT, "other"), Err(Errno::EXIST));
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    assert_eq!(driver.add_name(folder, ROOT, "loop"), Err(Errno::PERM));
    assert_eq!(
        fs::metadata(root.join("other")).expect("metadata").ino(),
        fs::metadata(root.join("folder/text"))
            .expect("metadata")
            .ino()
    );
}

#[test]
fn names_that_lead_elsewhere_change_nothing() {
    let (outer, _root, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    let before = changed(outer.path());
    for bad in [
        "",
        ".",
        "..",
        "../secret",
        "folder/text",
        "/tmp/file",
        "a\0b",
    ] {
        let refused = [
            driver.create(folder, bad, RDWR, REGULAR | 0o600).map(drop),
            driver.make(opcode::MKDIR, folder, bad, 0o700).map(drop),
            driver
                .make(opcode::MKNOD, folder, bad, REGULAR | 0o600)
                .map(drop),
            driver.add_name(folder, ROOT, bad).map(drop),
            driver.remove(opcode::UNLINK, folder, bad),
            driver.remove(opcode::RMDIR, folder, bad),
            driver.rename((folder, bad), (ROOT, "new"), 0),
            driver.rename((folder, "text"), (ROOT, bad), 0),
        ];
        for answer in refused {
            assert!(
                matches!(answer, Err(Errno::INVAL | Errno::STALE)),
                "{bad:?}: {answer:?}"
            );
        }
        // A link's text and name are told apart by a zero alone.
        if !bad.contains('\0') {
            assert_eq!(driver.link(folder, bad, "x").err(), Some(Errno::INVAL));
        }
    }
    assert_eq!(changed(outer.path()), before);
}

#[test]
fn devices_and_files_with_the_rights_of_others_are_refused() {
    let (outer, root, mut driver) = fixture();
    let text = driver.walk("folder/text").expect("there").node;
    let before = changed(outer.path());
    for kind in [
        libc::S_IFCHR,
        libc::S_IFBLK,
        libc::S_IFIFO,
        libc::S_IFSOCK,
        libc::S_IFDIR,
    ] {
        let made = driver.make(opcode::MKNOD, ROOT, "node", kind | 0o600);
        assert_eq!(made, Err(Errno::PERM));
    }
    for rights in [0o4755, 0o2755, 0o6711] {
        let refused = [
            driver
                .create(ROOT, "file", RDWR, REGULAR | rights)
                .map(drop),
            driver
                .make(opcode::MKNOD, ROOT, "file", REGULAR | rights)
                .map(drop),
            driver.make(opcode::MKDIR, ROOT, "file", rights).map(drop),
            driver
                .set(
                    text,
                    SetattrIn {
                        valid: valid::MODE,
                        mode: rights,
                        ..SetattrIn::default()
                    },
                )
                .map(drop),
        ];
        assert_eq!(refused, [Err(Errno::PERM); 4], "{rights:o}");
    }
    for (bit, uid, gid) in [(valid::UID, 12345, 0), (valid::GID, 0, 12345)] {
        let owner = SetattrIn {
            valid: bit,
            uid,
            gid,
            ..SetattrIn::default()
        };
        assert_eq!(driver.set(text, owner).err(), Some(Errno::PERM));
    }
    assert_eq!(changed(outer.path()), before);
    // A file that has them keeps them from no one: a write takes them away, as natively.
    driver
        .make(opcode::MKNOD, ROOT, "plain", REGULAR | 0o640)
        .expect("made");
    assert_eq!(mode_of(&root.join("plain")), 0o640);
    // A folder inherits the bit of the one above it, for the group of its files. Files do not.
    fs::set_permissions(root.join("folder"), Permissions::from_mode(0o2755)).expect("a mode");
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    driver
        .make(opcode::MKDIR, folder, "below", 0o750)
        .expect("made");
    driver
        .make(opcode::MKNOD, folder, "plain", REGULAR | 0o750)
        .expect("made");
    let modes = ["below", "plain"].map(|name| mode_of(&root.join("folder").join(name)));
    assert_eq!(modes, [0o2750, 0o750]);
}

#[test]
fn attributes_change() {
    let (_outer, root, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    let text = driver.look_up(folder, "text").expect("there");
    let path = root.join("folder/text");
    let mut asked = SetattrIn {
        valid: valid::MODE | valid::SIZE | valid::MTIME | valid::UID | valid::GID,
        mode: REGULAR | 0o200,
        size: 3,
        mtime: 12,
        mtimensec: 34,
        // Its own.
        uid: text.attr.uid,
        gid: text.attr.gid,
        ..SetattrIn::default()
    };
    let set = driver.set(text.node, asked).expect("set").attr;
    assert_eq!((set.size, set.mode & 0o777), (3, 0o200));
    assert_eq!((set.mtime, set.mtimensec), (12, 34));
    assert_eq!(fs::metadata(&path).expect("metadata").len(), 3);
    asked.valid = valid::MODE | valid::MTIME_NOW;
    asked.mode = 0o644;
    assert!(driver.set(text.node, asked).expect("set").attr.mtime > 12);
    asked.mode = 0o700;
    driver.set(folder, asked).expect("set");
    assert_eq!(mode_of(&root.join("folder")), 0o700);
    driver.set(ROOT, asked).expect("set");
    // An offset beyond any file, and a time that no clock has.
    asked.valid = valid::SIZE;
    asked.size = u64::MAX;
    assert!(driver.set(text.node, asked).is_err());
    asked.valid = valid::ATIME;
    asked.atimensec = u32::MAX;
    assert!(driver.set(text.node, asked).is_err());
}

#[test]
fn a_file_that_the_host_made_first_is_opened_unless_it_must_be_new() {
    let (_outer, root, mut driver) = fixture();
    fs::write(root.join("file"), "the host's").expect("a file");
    let made = driver.create(ROOT, "file", RDWR | EXCL, REGULAR | 0o600);
    assert_eq!(made, Err(Errno::EXIST));
    let (_, handle) = driver
        .create(ROOT, "file", RDWR, REGULAR | 0o600)
        .expect("opened");
    assert_eq!(driver.read_open(handle).as_deref(), Ok(&b"the host's"[..]));
    driver
        .create(ROOT, "file", RDWR | TRUNC, REGULAR | 0o600)
        .expect("opened");
    assert_eq!(fs::read(root.join("file")).expect("a file"), b"");
    // Both access bits together are no access.
    assert_eq!(
        driver.create(ROOT, "other", 3, REGULAR | 0o600),
        Err(Errno::INVAL)
    );
}

#[test]
fn a_guest_has_a_bounded_number_of_open_files() {
    let (_outer, root, mut driver) = fixture();
    let text = driver.walk("folder/text").expect("there").node;
    let mut handles = Vec::new();
    for _ in 0..MOST_HANDLES {
        handles.push(driver.open(text, RDONLY).expect("opened"));
    }
    assert_eq!(driver.open(text, RDONLY), Err(Errno::NFILE));
    assert_eq!(
        driver.create(ROOT, "new", RDWR, REGULAR | 0o600),
        Err(Errno::NFILE)
    );
    assert!(!root.join("new").exists());
    driver.close(handles[7]);
    assert!(driver.open(text, RDONLY).is_ok());
    // Another driver has none of them.
    let init = [7u32, 31, 0, 0];
    driver
        .ask(opcode::INIT, 0, init.as_bytes())
        .expect("an answer");
    assert_eq!(driver.read_open(handles[0]), Err(Errno::BADF));
}

/// Folders that the host moves out, and links that it puts in their place.
#[test]
fn nothing_outside_is_changed() {
    let (outer, root, mut driver) = fixture();
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    let text = driver.look_up(folder, "text").expect("there").node;
    let handle = driver.open(text, RDWR).expect("opened");
    let beyond = outer.path().join("beyond");
    fs::rename(root.join("folder"), &beyond).expect("moved");
    symlink(&beyond, root.join("folder")).expect("a link");
    let before = changed(outer.path());
    let asked = SetattrIn {
        valid: valid::SIZE | valid::MODE | valid::MTIME_NOW,
        mode: 0o777,
        ..SetattrIn::default()
    };
    let through_the_handle = SetattrIn {
        valid: valid::SIZE | valid::FH,
        fh: handle,
        ..SetattrIn::default()
    };
    let refused = [
        driver.write(handle, 0, b"changed").map(drop),
        driver.read_open(handle).map(drop),
        driver.set(text, asked).map(drop),
        driver.set(text, through_the_handle).map(drop),
        driver.set(folder, asked).map(drop),
        driver.open(text, WRONLY).map(drop),
        driver
            .create(folder, "new", RDWR, REGULAR | 0o600)
            .map(drop),
        driver.make(opcode::MKDIR, folder, "new", 0o700).map(drop),
        driver.link(folder, "new", "x").map(drop),
        driver.add_name(text, ROOT, "new").map(drop),
        driver.remove(opcode::UNLINK, folder, "text"),
        driver.rename((folder, "text"), (ROOT, "new"), 0),
        driver.rename((ROOT, "none"), (folder, "new"), 0),
        driver.ask(opcode::FSYNCDIR, folder, &[0; 16]).map(drop),
    ];
    for (number, answer) in refused.iter().enumerate() {
        let is_gone = matches!(answer, Err(Errno::STALE | Errno::NOENT));
        assert!(is_gone, "{number}: {answer:?}");
    }
    assert_eq!(changed(outer.path()), before);
}

/// The host's own rules hold: the guest has the rights of this process's user.
#[test]
fn what_the_user_may_not_change_stays() {
    let (outer, root, mut driver) = fixture();
    // Root may change what it likes, until its process gives the capability up.
    if rustix::process::geteuid().is_root() {
        return;
    }
    fs::set_permissions(root.join("folder"), Permissions::from_mode(0o500)).expect("a mode");
    let folder = driver.look_up(ROOT, "folder").expect("there").node;
    let before = changed(outer.path());
    assert_eq!(
        driver.create(folder, "new", RDWR, REGULAR | 0o600),
        Err(Errno::ACCESS)
    );
    assert_eq!(
        driver.remove(opcode::UNLINK, folder, "text"),
        Err(Errno::ACCESS)
    );
    assert_eq!(changed(outer.path()), before);
}
