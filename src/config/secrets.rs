//! Files of secrets.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use super::node::Wrong;

/// The longest file of a secret, in bytes.
const LARGEST: u64 = 64 * 1024;

/// What to do about a file that cannot be read.
pub(super) const FILE_HINT: &str =
    "the path counts from where oncegate is started; the user that runs it must be able to read the file";

/// Reads the file of a secret, without the white space at both ends.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Wrong> {
    read_most(path, LARGEST)
}

/// Reads the file of a secret as it is.
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>, Wrong> {
    read_at_most(path, LARGEST)
}

/// Reads a file of at most so many bytes, without the white space at both ends.
pub(super) fn read_most(path: &Path, most: u64) -> Result<Vec<u8>, Wrong> {
    read_at_most(path, most).map(|content| content.trim_ascii().to_vec())
}

fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, Wrong> {
    let mut content = Vec::new();
    let reading = File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut content));
    if let Err(error) = reading {
        let wrong = Wrong::new(format!("{} cannot be read: {error}", path.display()));
        return Err(wrong.hint(FILE_HINT));
    }
    if content.len() as u64 > most {
        let wrong = Wrong::new(format!("{} is longer than {most} bytes", path.display()));
        return Err(wrong.hint("name a file that holds nothing but the secret"));
    }
    Ok(content)
}
