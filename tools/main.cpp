// SPDX-License-Identifier: Apache-2.0
// The uniep program: parses the command line and maps failures to exit codes: 0 ok, 1 a check
// failed, 2 bad arguments or input, 3 it cannot run here or the world failed.
#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "base/error.hpp"
#include "commands.hpp"
#include "io/output_file.hpp"
#include "uniep/version.hpp"

namespace {

int report(const std::string& text, int code) {
  fmt::print(stderr, "uniep: {}\n", text);
  return code;
}

// A file opened while a standard stream is closed would take its place, and tables would go there.
void open_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF)
      static_cast<void>(::open("/dev/null", O_RDWR));
  }
}

std::string join(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return text;
}

// One sentence for what CLI11 refused: the value, and what would be valid.
std::string describe(const CLI::App& app, const CLI::ParseError& error) {
  const auto parsed = app.get_subcommands();
  if (parsed.empty()) {
    std::vector<std::string> names;
    for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
    const auto rest = app.remaining();
    const std::string got =
        rest.empty() ? "no command is given" : uniep::quote(rest[0]) + " is no command";
    return fmt::format("{}; commands are {} (see uniep --help)", got, join(names));
  }
  const CLI::App& command = *parsed.front();
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    names.push_back(option->get_name());
    if (option->count() > 1) {
      return fmt::format("{} is given {} times; give it once", names.back(), option->count());
    }
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    auto rest = app.remaining(true);
    // CLI11 reports them last first.
    const std::string first = rest.empty() ? "" : rest.front();
    const bool is_flag = first.starts_with("-") && first != "-";
    if (is_flag) {
      return fmt::format("{} is no option of uniep {}; options are {}", uniep::quote(first),
                         command.get_name(), join(names));
    }
    return fmt::format("{} is one argument too many for uniep {} (see uniep {} --help)",
                       uniep::quote(first), command.get_name(), command.get_name());
  }
  if (const std::string text = error.what(); text.find(" missing") != std::string::npos) {
    return fmt::format("{} needs a value (see uniep {} --help)", text.substr(0, text.find(':')),
                       command.get_name());
  }
  return fmt::format("{} (see uniep {} --help)", error.what(), command.get_name());
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  uniep::remove_unfinished_files_on_signals();
  CLI::App app{"The expert layer of Mixture-of-Experts models: the same bits on any schedule."};
  app.name("uniep");
  app.set_version_flag("--version", std::string("uniep ") + UNIEP_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 ok; 1 a check failed; 2 bad arguments or input; 3 it cannot run here, or "
      "memory,\na peer or a wait failed. 'uniep COMMAND --help' has the options of a command.");
  uniep::tools::Run run;
  uniep::tools::add_info(app, run);
  uniep::tools::add_case(app, run);
  uniep::tools::add_run(app, run);
  uniep::tools::add_verify(app, run);
  uniep::tools::add_bench(app, run);
  uniep::tools::add_trace(app, run);
  uniep::tools::add_train(app, run);
  uniep::tools::add_simulate(app, run);
  uniep::tools::add_tune(app, run);
  for (CLI::App* command : app.get_subcommands({})) {
    for (CLI::Option* option : command->get_options()) {
      option->multi_option_policy(CLI::MultiOptionPolicy::Throw);
    }
  }
  try {
    app.parse(argc, argv);
    const int code = run();
    if (std::fflush(stdout) != 0) {
      return report(fmt::format("standard output cannot be written: {}", std::strerror(errno)), 3);
    }
    return code;
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    return report(describe(app, error), 2);
  } catch (const uniep::Error& error) {
    return report(error.what(), error.code() == uniep::ErrorCode::invalid_argument ? 2 : 3);
  } catch (const std::bad_alloc&) {
    return report("memory is not there for this size; use fewer tokens or a smaller shape", 3);
  } catch (const std::exception& error) {
    return report(error.what(), 3);
  }
}
