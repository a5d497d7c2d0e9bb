//! Certificates for servers that encrypt and for those who come to them, made by OpenSSL.

use std::path::Path;
use std::process::Command;

/// Whether there is an OpenSSL. Says that a test is skipped where there is not, and fails instead where `CI` is set.
#[track_caller]
pub fn can_be_made() -> bool {
    let can = Command::new("openssl").arg("version").output().is_ok();
    if !can {
        super::skipped("OpenSSL");
    }
    can
}

/// A certificate that others can be signed by: `NAME.pem` and its key, `NAME.key`.
#[track_caller]
pub fn authority(directory: &Path, name: &str) {
    let (subject, out) = (format!("/CN={name}"), format!("{name}.pem"));
    with_new_key(directory, &["req", "-x509", "-subj", &subject, "-out", &out], name);
}

/// `NAME.pem`, with its key, signed by that authority.
#[track_caller]
pub fn signed(directory: &Path, name: &str, by: &str, extension: &str) {
    let (subject, request) = (format!("/CN={name}"), format!("{name}.csr"));
    with_new_key(directory, &["req", "-subj", &subject, "-out", &request], name);
    std::fs::write(directory.join("extensions"), format!("basicConstraints=CA:FALSE\n{extension}\n")).unwrap();
    let (ca, ca_key, out) = (format!("{by}.pem"), format!("{by}.key"), format!("{name}.pem"));
    let mut command = Command::new("openssl");
    command.args(["x509", "-req", "-in", &request, "-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial", "-days", "3"]);
    run(command.args(["-extfile", "extensions", "-out", &out]).current_dir(directory));
}

/// Asks for a certificate with a new key, `KEY.key`.
#[track_caller]
fn with_new_key(directory: &Path, args: &[&str], key: &str) {
    let key = format!("{key}.key");
    let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3", "-keyout", &key];
    run(Command::new("openssl").args(args).args(curve).current_dir(directory));
}

/// Runs a command of OpenSSL.
#[track_caller]
pub fn run(command: &mut Command) {
    let output = command.output().expect("openssl is installed");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
