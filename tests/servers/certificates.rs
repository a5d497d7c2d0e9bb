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
    sign(directory, name, by, &format!("basicConstraints=CA:FALSE\n{extension}\n"));
}

/// As [`authority`], but that it is signed by another.
#[track_caller]
pub fn authority_of(directory: &Path, name: &str, by: &str) {
    sign(directory, name, by, "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n");
}

#[track_caller]
fn sign(directory: &Path, name: &str, by: &str, extensions: &str) {
    let (subject, request) = (format!("/CN={name}"), format!("{name}.csr"));
    with_new_key(directory, &["req", "-subj", &subject, "-out", &request], name);
    std::fs::write(directory.join("extensions"), extensions).unwrap();
    let (ca, ca_key, out) = (format!("{by}.pem"), format!("{by}.key"), format!("{name}.pem"));
    let mut command = Command::new("openssl");
    command.args(["x509", "-req", "-in", &request, "-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial", "-days", "3"]);
    run(command.args(["-extfile", "extensions", "-out", &out]).current_dir(directory));
}

/// `LIST.pem`: the certificates of these names, as the list of what that authority has revoked. Good for a day. A list of more
/// names is a later one.
#[track_caller]
pub fn revoked(directory: &Path, list: &str, by: &str, names: &[&str]) {
    let database =
        format!("[ca]\ndefault_ca=own\n[own]\ndatabase={list}.index\ncrlnumber={list}.number\ndefault_md=sha256\n");
    let number = format!("{:02}\n", names.len() + 1);
    for (end, content) in [("index", ""), ("number", &number), ("database", &database)] {
        std::fs::write(directory.join(format!("{list}.{end}")), content).unwrap();
    }
    let (ca, ca_key, out) = (format!("{by}.pem"), format!("{by}.key"), format!("{list}.pem"));
    let database = format!("{list}.database");
    let ca = |args: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["ca", "-config", &database, "-cert", &ca, "-keyfile", &ca_key]).args(args);
        run(command.current_dir(directory));
    };
    names.iter().for_each(|name| ca(&["-revoke", &format!("{name}.pem")]));
    ca(&["-gencrl", "-crldays", "1", "-out", &out]);
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
