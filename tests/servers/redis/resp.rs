//! A session with a Redis, in its own protocol (RESP 2), for what tests want to see and to spoil.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// The longest that a server may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// What a server says to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Status(String),
    Error(String),
    Number(i64),
    Nothing,
    Bytes(Vec<u8>),
    List(Vec<Reply>),
}

/// A connection.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects, and logs in where there is a password.
    pub fn open(address: SocketAddr, password: Option<&str>) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, ANSWER)?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.set_nodelay(true)?;
        let mut connection = Self { stream: BufReader::new(stream) };
        if let Some(password) = password {
            connection.ask(&["AUTH", password])?.status().map_err(io::Error::other)?;
        }
        Ok(connection)
    }

    /// What the server says to a command.
    pub fn ask<A: AsRef<[u8]>>(&mut self, command: &[A]) -> io::Result<Reply> {
        self.stream.get_mut().write_all(&encoded(command))?;
        self.read()
    }

    /// What the server says to each of many commands, which it gets at once.
    pub fn ask_all<A: AsRef<[u8]>>(&mut self, commands: &[Vec<A>]) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::with_capacity(commands.len());
        // So many that neither side waits for the other to read.
        for some in commands.chunks(100) {
            let bytes: Vec<u8> = some.iter().flat_map(|command| encoded(command)).collect();
            self.stream.get_mut().write_all(&bytes)?;
            for _ in some {
                replies.push(self.read()?);
            }
        }
        Ok(replies)
    }

    fn read(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        let line = line.strip_suffix(b"\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
        let (kind, rest) = line.split_first().ok_or(io::ErrorKind::InvalidData)?;
        let rest = std::str::from_utf8(rest).map_err(io::Error::other)?;
        let number = || rest.parse::<i64>().map_err(io::Error::other);
        Ok(match kind {
            b'+' => Reply::Status(rest.into()),
            b'-' => Reply::Error(rest.into()),
            b':' => Reply::Number(number()?),
            b'$' | b'*' if number()? < 0 => Reply::Nothing,
            b'$' => {
                let mut bytes = vec![0; usize::try_from(number()?).expect("not negative") + 2];
                self.stream.read_exact(&mut bytes)?;
                bytes.truncate(bytes.len() - 2);
                Reply::Bytes(bytes)
            }
            b'*' => Reply::List((0..number()?).map(|_| self.read()).collect::<io::Result<_>>()?),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        })
    }
}

impl Reply {
    /// What it says in one word; an error as one.
    pub fn status(self) -> Result<String, String> {
        match self {
            Self::Status(word) => Ok(word),
            Self::Error(error) => Err(error),
            other => Err(format!("no status: {other:?}")),
        }
    }

    #[track_caller]
    pub fn number(&self) -> i64 {
        let Self::Number(number) = self else { panic!("no number: {self:?}") };
        *number
    }

    #[track_caller]
    pub fn bytes(self) -> Vec<u8> {
        let Self::Bytes(bytes) = self else { panic!("no bytes: {self:?}") };
        bytes
    }

    /// Bytes as text.
    #[track_caller]
    pub fn text(self) -> String {
        String::from_utf8(self.bytes()).expect("text")
    }

    #[track_caller]
    pub fn list(self) -> Vec<Self> {
        let Self::List(list) = self else { panic!("no list: {self:?}") };
        list
    }
}

fn encoded<A: AsRef<[u8]>>(command: &[A]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
    for part in command {
        let part = part.as_ref();
        bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
