//! A configuration: whatever it says, it is in force or every problem is told, and what is in force can be written down
//! and read again.

#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use oncegate::config::load_text;

fuzz_target!(|text: &[u8]| {
    let Ok(text) = std::str::from_utf8(text) else { return };
    // Files of secrets and certificates would be read.
    if text.contains("_file") || ["sslrootcert", "sslcert", "sslkey"].iter().any(|name| text.contains(name)) {
        return;
    }
    let load = |text: &str| load_text(PathBuf::from("gate.toml"), text);
    match load(text) {
        Ok(resolved) => {
            let effective = resolved.effective.to_string();
            let again = load(&effective).unwrap_or_else(|problems| panic!("{problems}\n{effective}"));
            assert_eq!(again.effective.to_string(), effective);
        }
        Err(problems) => {
            assert!(problems.count() > 0);
            assert!(problems.to_string().contains("gate.toml"), "{problems}");
        }
    }
});
