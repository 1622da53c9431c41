//! `--rootfs` with an image in the OCI's layout.
//!
//! A process of its own unpacks the image into a new folder, and removes that once its starter has ended, however it
//! does: the process reads standard input to its end.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::Args;
use serde::{Deserialize, Serialize};
use wormhole_images::{ImageProgram, User, is_layout};
use wormhole_link::{chain, tasks};

use super::environment::{Variable, variable};
use super::{Options, RunError};
use crate::installation::Installation;
use crate::private;

/// Arguments of the process.
#[derive(Debug, Args)]
pub struct Layout {
    folder: PathBuf,
}

/// The one line that the process writes.
#[derive(Debug, Deserialize, Serialize)]
enum Said {
    Unpacked {
        root: PathBuf,
        program: ImageProgram,
        user: Option<String>,
    },
    Failed(String),
}

/// Runs as the process.
pub fn hold(layout: Layout) {
    let place = private::folder("wormhole-image-");
    let place = match place {
        Ok(place) => place,
        Err(error) => return say(&Said::Failed(format!("cannot make a folder: {error}"))),
    };
    let root = place.path().join("root");
    let unpacking = tasks::spawn("unpack", move || {
        let unpacked = std::panic::catch_unwind(|| unpack(&layout.folder, root));
        let unpacked =
            unpacked.unwrap_or_else(|_| Err("the unpacking ended with a panic".to_owned()));
        say(&unpacked.unwrap_or_else(Said::Failed));
    });
    if let Err(error) = unpacking {
        return say(&Said::Failed(format!("cannot start a thread: {error}")));
    }
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    // Files may still be made. Once their folder is gone, no more are.
    while let Err(error) = wormhole_images::remove_unpacked(place.path()) {
        if error.kind() != io::ErrorKind::DirectoryNotEmpty {
            break;
        }
    }
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).unwrap_or_default();
    // A starter that has ended reads nothing.
    let _ = writeln!(io::stdout(), "{line}");
}

fn unpack(layout: &Path, root: PathBuf) -> Result<Said, String> {
    std::fs::create_dir(&root).map_err(|error| format!("cannot make a folder: {error}"))?;
    let program = wormhole_images::unpack(layout, &root).map_err(|error| chain(&error))?;
    let user = program.user(&root).map_err(|error| chain(&error))?;
    Ok(Said::Unpacked {
        root,
        program,
        user: user.map(|user| user.to_string()),
    })
}

/// The process that holds an unpacked image. Its folder is removed when this is dropped.
#[derive(Debug)]
pub struct Unpacked(Child);

impl Drop for Unpacked {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Options {
    /// Unpacks the image, if `--rootfs` names one, and takes from it what the caller does not say.
    pub fn open_layout(&mut self) -> Result<Option<Unpacked>, RunError> {
        let Some(layout) = self.rootfs.clone().filter(|folder| is_layout(folder)) else {
            return Ok(None);
        };
        let failed = |source| RunError::Io {
            what: "cannot start the process that unpacks the image".to_owned(),
            source,
        };
        let mut process = Command::new(Installation::locate()?.command())
            .arg("unpack")
            .arg("--")
            .arg(&layout)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals of the terminal are for the program.
            .process_group(0)
            .spawn()
            .map_err(|error| failed(tasks::named(error)))?;
        let output = process.stdout.take();
        let unpacked = Unpacked(process);
        let mut line = String::new();
        if let Some(output) = output {
            BufReader::new(output)
                .read_line(&mut line)
                .map_err(failed)?;
        }
        match serde_json::from_str(&line) {
            Ok(Said::Unpacked {
                root,
                program,
                user,
            }) => {
                self.rootfs = Some(root);
                self.adopt(program, user.and_then(|user| user.parse().ok()));
                Ok(Some(unpacked))
            }
            Ok(Said::Failed(why)) => Err(RunError::Layout { layout, why }),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Takes from an image what the caller does not say.
    fn adopt(&mut self, program: ImageProgram, user: Option<User>) {
        // The caller's come last, and so they count.
        let variables = program.env.into_iter().filter_map(variable_of_image);
        self.env.splice(0..0, variables);
        self.image_user = user;
        if !program.working_dir.is_empty() {
            self.workdir
                .get_or_insert_with(|| program.working_dir.into());
        }
        if self.command.is_empty() {
            let words = program.entrypoint.into_iter().chain(program.cmd);
            self.command = words.map(Into::into).collect();
        }
    }
}

/// Returns a variable of an image. A name alone has no value: the caller's is not the image's to take.
fn variable_of_image(text: String) -> Option<Variable> {
    text.contains('=').then(|| variable(text.into()).ok())?
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::run::files::Export;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn options(line: &[&str]) -> Options {
        let line = std::iter::once(&"run").chain(line);
        Line::try_parse_from(line).expect("options").options
    }

    #[test]
    fn an_image_reads_no_variable_of_its_callers() {
        let mut options = options(&["--env", "OWN=mine", "true"]);
        let image = ImageProgram {
            env: ["PATH", "HOME=/image", "NONE", "=", "", "OWN=image", "E="]
                .map(str::to_owned)
                .to_vec(),
            ..ImageProgram::default()
        };
        options.adopt(image, None);
        let wanted = [
            ("HOME", "/image"),
            ("OWN", "image"),
            ("E", ""),
            ("OWN", "mine"),
        ];
        let wanted = wanted.map(|(name, value)| (name.into(), value.into()));
        assert_eq!(options.env, wanted);
    }

    #[test]
    fn the_user_of_an_image_counts_in_the_guest_alone() {
        let of_image: User = "1234:567:89".parse().expect("a user");
        for named in [None, Some("4321:4321:")] {
            let mut line = vec!["--volume", "/tmp:/data"];
            line.extend(named.iter().flat_map(|user| ["--user", user]));
            line.push("true");
            let mut options = options(&line);
            options.adopt(ImageProgram::default(), Some(of_image.clone()));
            let named: Option<User> = named.map(|user| user.parse().expect("a user"));
            let in_guest = options.user().expect("a user");
            assert_eq!(&in_guest, named.as_ref().unwrap_or(&of_image));
            let export = Export::of(&options.volume[0], &options);
            assert_eq!(export.writer(), named.as_ref());
        }
    }
}
