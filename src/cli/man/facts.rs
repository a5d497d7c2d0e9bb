//! What clap does not know of the commands: how they end, which files and variables count, and examples. The manual pages and
//! `docs/reference/command-line.md` are made of it.

use clap::Command;

use crate::cli::FILE_VARIABLE;

/// Names and what they mean.
type Entries = &'static [(&'static str, &'static str)];

/// What the manual says of a command besides its options.
pub(in crate::cli) struct Facts {
    /// The command, as `records resolve`; empty for `oncegate` itself.
    pub(in crate::cli) command: &'static str,
    /// How it ends, but for [`WRONG_USAGE`].
    ends: &'static [(u8, &'static str)],
    pub(in crate::cli) files: Entries,
    pub(in crate::cli) environment: Entries,
    /// What an example does, and the example.
    pub(in crate::cli) examples: Entries,
}

/// How every command ends where its command line is wrong.
const WRONG_USAGE: (u8, &str) = (crate::cli::WRONG_USAGE, "The command line is wrong.");

/// How a command ends that only prints something.
const PRINTED: &[(u8, &str)] = &[(0, "The text is printed."), (1, "The output cannot be written.")];

/// How a command ends that asks the admin listener.
const ASKED: &[(u8, &str)] = &[
    (0, "The gate did what was asked."),
    (1, "The gate cannot be asked, refuses, or cannot do it, or a filter was not confirmed. The message says why."),
    (78, "What --config names cannot be read, or its [admin] has a problem."),
];

const CONFIGURATION: (&str, &str) =
    ("oncegate.toml", "The usual name of the configuration file. It is read only where --config names it.");
const TOKEN: (&str, &str) =
    ("admin.token_file", "The token of the admin listener, in the file that this key or --token-file names.");
const SETTINGS: (&str, &str) = (
    "ONCEGATE_SECTION__KEY",
    "Sets a key of the configuration, as ONCEGATE_SERVER__LISTEN. It overrides the file, and a flag overrides it.",
);
const FILE: (&str, &str) = (FILE_VARIABLE, "The configuration file, as --config names it.");
const ADMIN: (&str, &str) = ("ONCEGATE_ADMIN__LISTEN", "Where the admin listener is, as --admin names it.");
const TOKEN_FILE: (&str, &str) =
    ("ONCEGATE_ADMIN__TOKEN_FILE", "A file with the token of the admin listener, as --token-file names it.");
const PGPASSWORD: (&str, &str) =
    ("PGPASSWORD", "The password of PostgreSQL where neither the URL nor store.password_file has one.");

const ADMIN_CA: (&str, &str) = (
    "ONCEGATE_ADMIN_CA",
    "The CA certificates to check the admin listener's certificate with, as --admin-ca names them.",
);
const ADMIN_CERT: (&str, &str) =
    ("ONCEGATE_ADMIN_CERT", "The certificate to show to the admin listener, as --admin-cert names it.");
const ADMIN_KEY: (&str, &str) = ("ONCEGATE_ADMIN_KEY", "The key of that certificate, as --admin-key names it.");

const ASKING: Entries = &[FILE, ADMIN, TOKEN_FILE, ADMIN_CA, ADMIN_CERT, ADMIN_KEY];

/// Facts of a command that only prints something.
const fn printing(command: &'static str, examples: Entries) -> Facts {
    Facts { command, ends: PRINTED, files: &[], environment: &[], examples }
}

/// Facts of a command that asks the admin listener.
const fn asking(command: &'static str, examples: Entries) -> Facts {
    Facts { command, ends: ASKED, files: &[CONFIGURATION, TOKEN], environment: ASKING, examples }
}

impl Facts {
    /// Those of every command, in the order of the help.
    pub(in crate::cli) const ALL: &[Self] = &[
        Self {
            command: "",
            ends: &[
                (0, "The command did what it was asked to do."),
                (1, "The command failed. The message says why."),
                (78, "The configuration is wrong, or a start with it would be refused."),
            ],
            files: &[CONFIGURATION],
            environment: &[SETTINGS, FILE],
            examples: &[
                (
                    "A gate in front of a service, with everything by default:",
                    "oncegate serve --upstream http://127.0.0.1:3000",
                ),
                ("What the gate protects from, shown in half a minute:", "oncegate demo"),
            ],
        },
        Self {
            command: "serve",
            ends: &[
                (0, "SIGTERM or SIGINT ended the gate."),
                (1, "The gate cannot start, or its store is no longer to be trusted. The log says why."),
                (78, "The configuration is wrong. Nothing was opened."),
            ],
            files: &[
                CONFIGURATION,
                (
                    "oncegate.db",
                    "The default store, in the working directory. Its -wal, -shm, .lock and .reserve stand beside it.",
                ),
                ("$TMPDIR or /tmp", "Large request bodies, in files without a name."),
            ],
            environment: &[
                SETTINGS,
                FILE,
                PGPASSWORD,
                ("NO_COLOR", "If it is not empty, the log has no colours."),
                ("TMPDIR", "Where large request bodies go. /tmp if it is not set."),
                (
                    "NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_FDS, LISTEN_FDNAMES",
                    "Set by systemd: readiness, the watchdog, and inherited sockets.",
                ),
            ],
            examples: &[
                ("A gate by a configuration file:", "oncegate serve --config oncegate.toml"),
                (
                    "A gate that shares its records with others by PostgreSQL:",
                    "oncegate serve --upstream http://127.0.0.1:3000 --store postgres://gate@db.internal/shop",
                ),
            ],
        },
        Self {
            command: "check",
            ends: &[
                (0, "The configuration is good. With --store, a start with it finds every live key."),
                (1, "The store cannot be asked, or its files are damaged."),
                (
                    78,
                    "The configuration has a problem. With --store: a start with it would be refused, or it lacks the key of an encrypted record.",
                ),
            ],
            files: &[CONFIGURATION],
            environment: &[SETTINGS, FILE, PGPASSWORD],
            examples: &[
                ("Every problem of a file, with its line:", "oncegate check --config oncegate.toml"),
                (
                    "Whether a restart would find the keys of a store that is in use:",
                    "oncegate check --config oncegate.toml --store sqlite:oncegate.db",
                ),
            ],
        },
        printing(
            "config",
            &[("The configuration in force, with its defaults:", "oncegate config print --config oncegate.toml")],
        ),
        printing("config default", &[("A file to start from:", "oncegate config default > oncegate.toml")]),
        printing("config schema", &[("A schema for an editor:", "oncegate config schema > oncegate.schema.json")]),
        Self {
            command: "config print",
            ends: &[
                (0, "The configuration is printed."),
                (1, "The output cannot be written."),
                (78, "The configuration has a problem."),
            ],
            files: &[CONFIGURATION],
            environment: &[SETTINGS, FILE],
            examples: &[("What is in force:", "oncegate config print --config oncegate.toml")],
        },
        Self {
            command: "explain",
            ends: &[
                (0, "The answer is printed, for a request that would be refused too."),
                (1, "A file of the request cannot be read, or the output cannot be written."),
                (78, "The configuration has a problem."),
            ],
            files: &[CONFIGURATION],
            environment: &[SETTINGS, FILE],
            examples: &[(
                "What the gate would do with a request that is written as for curl:",
                "oncegate explain --config oncegate.toml -H 'Idempotency-Key: k' -d amount=100 http://api.test/v1/charges",
            )],
        },
        Self {
            command: "migrate",
            ends: &[
                (0, "The schema is that of this version, or the store needs none."),
                (1, "The database cannot be reached, does not let this role in, or refuses a change."),
                (78, "The [store] table has a problem."),
            ],
            files: &[CONFIGURATION],
            environment: &[SETTINGS, FILE, PGPASSWORD],
            examples: &[(
                "The SQL that would run:",
                "oncegate migrate --store postgres://gate@db.internal/shop --dry-run",
            )],
        },
        asking("records", &[("The records that wait for a decision:", "oncegate records list --state unknown")]),
        asking(
            "records list",
            &[
                ("Records whose outcome is unknown:", "oncegate records list --state unknown"),
                ("The records of a key that a customer quotes:", "oncegate records list --key order-1"),
                ("All records of a route, as JSON:", "oncegate records list --route create-charge --all --json"),
            ],
        ),
        asking(
            "records show",
            &[("A record, by the first digits of its id, with its answer:", "oncegate records show 0a1b2c3d --answer")],
        ),
        asking(
            "records resolve",
            &[
                (
                    "The attempt had no effect: a retry runs again.",
                    "oncegate records resolve ID --release --reason 'no such charge at the bank'",
                ),
                (
                    "The attempt had this answer: retries get it.",
                    "oncegate records resolve ID --complete --status 201 --body @answer.json --reason 'found as ch_7'",
                ),
            ],
        ),
        asking(
            "records purge",
            &[
                ("Which records would go:", "oncegate records purge --route trial --dry-run"),
                ("And away with them:", "oncegate records purge --route trial --yes --reason 'the trial is over'"),
            ],
        ),
        asking("records reseal", &[("After a reload with a new first key:", "oncegate records reseal")]),
        asking(
            "records retry",
            &[
                ("After the upstream is back:", "oncegate records retry ID --reason 'the ledger is back'"),
                (
                    "All that a route gave up:",
                    "oncegate records retry --route ROUTE --reason 'the ledger is back' --yes",
                ),
            ],
        ),
        asking("deliveries", &[("The accepted requests that were given up:", "oncegate deliveries list --state dead")]),
        asking(
            "deliveries list",
            &[
                ("What was given up, and why:", "oncegate deliveries list --state dead"),
                ("What a route still has to deliver:", "oncegate deliveries list ROUTE --state queued"),
            ],
        ),
        asking(
            "deliveries pause",
            &[("Before a maintenance of the upstream:", "oncegate deliveries pause ROUTE --reason maintenance")],
        ),
        asking("deliveries resume", &[("After it:", "oncegate deliveries resume ROUTE")]),
        asking(
            "audit",
            &[
                ("What was done since yesterday:", "oncegate audit --since 1d"),
                ("Who removed records of many keys, and why:", "oncegate audit --action bulk-purge --all"),
                ("The history of a record that is gone, as JSON:", "oncegate audit --record ID --json"),
            ],
        ),
        Self {
            command: "observed",
            ends: &[
                (0, "The report is printed."),
                (1, "The gate cannot be asked, or refused."),
                (78, "What --config names cannot be read, or its [admin] has a problem."),
            ],
            files: &[CONFIGURATION, TOKEN],
            environment: ASKING,
            examples: &[("What protection would have done so far:", "oncegate observed")],
        },
        Self {
            command: "health",
            ends: &[
                (0, "The gate is ready."),
                (1, "The gate is not ready, for the reason that is printed, or cannot be asked."),
            ],
            files: &[CONFIGURATION],
            environment: ASKING,
            examples: &[("The health check of a container:", "oncegate health --config /etc/oncegate/oncegate.toml")],
        },
        Self {
            command: "reload",
            ends: &[
                (0, "The new configuration is in force. What needs a restart is named."),
                (1, "The gate cannot be asked, or could not change over. It goes on with the former configuration."),
                (78, "The configuration has problems, which are printed. The gate goes on with the former one."),
            ],
            files: &[CONFIGURATION, TOKEN],
            environment: ASKING,
            examples: &[("After an edit of the file:", "oncegate reload --config /etc/oncegate/oncegate.toml")],
        },
        printing("keys", &[("A new key for encryption at rest:", "oncegate keys generate --out oncegate-key-1")]),
        Self {
            command: "keys generate",
            ends: &[(0, "The key is printed or written."), (1, "The file exists, or cannot be written.")],
            files: &[],
            environment: &[],
            examples: &[(
                "A new key, in a file that only its owner can read:",
                "oncegate keys generate --out oncegate-key-1",
            )],
        },
        printing("completions", &[("For bash:", "oncegate completions bash > oncegate.bash")]),
        Self {
            command: "docs",
            ends: &[(0, "The text is printed."), (1, "There is no such code, or the output cannot be written.")],
            files: &[],
            environment: &[],
            examples: &[("What a 409 means, and what to do:", "oncegate docs outcome-unknown")],
        },
        Self {
            command: "man",
            ends: &[(0, "The page is printed, or the pages are written."), (1, "The output cannot be written.")],
            files: &[],
            environment: &[],
            examples: &[
                ("A page on the screen:", "oncegate man records resolve | man -l -"),
                ("The pages of all commands, for man to find:", "oncegate man --dir /usr/local/share/man/man1"),
            ],
        },
        Self {
            command: "demo",
            ends: &[
                (0, "No customer was charged twice through the gate."),
                (1, "A customer was charged twice through the gate, or the demo failed."),
            ],
            files: &[],
            environment: &[("NO_COLOR", "If it is not empty, the output has no colours.")],
            examples: &[("Without the pauses:", "oncegate demo --fast")],
        },
        printing("version", &[("The version of this program:", "oncegate version")]),
    ];

    /// Those of a command of [`super::whole`].
    pub(in crate::cli) fn of(command: &Command) -> Option<&'static Self> {
        let path = path_of(command);
        Self::ALL.iter().find(|facts| facts.command == path)
    }

    /// Every exit status with its meaning, in ascending order.
    pub(in crate::cli) fn statuses(&self) -> impl Iterator<Item = (u8, &'static str)> {
        let mut statuses: Vec<_> = self.ends.iter().copied().chain([WRONG_USAGE]).collect();
        statuses.sort_by_key(|(status, _)| *status);
        statuses.into_iter()
    }
}

/// `records resolve` of a command of [`super::whole`].
pub(in crate::cli) fn path_of(command: &Command) -> String {
    let whole_name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    whole_name.strip_prefix("oncegate").unwrap_or(whole_name).trim_start().to_owned()
}
